"""A link with a distance: a proxy, in a process of its own, that holds every byte back for a while each way."""

import asyncio
import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection

from tests.forked import CONTEXT


@contextlib.contextmanager
def distant(port: int, seconds: float) -> Iterator[int]:
    """A port that leads to `port` of this machine, `seconds` away: half a round trip."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(theirs, port, seconds), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection, port: int, seconds: float) -> None:
    asyncio.run(_proxy(pipe, port, seconds))


async def _proxy(pipe: Connection, port: int, seconds: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_carry(reader, there[1], seconds), _carry(there[0], writer, seconds))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Pass on what comes, each piece `seconds` after it came, while later ones are under way already."""
    loop = asyncio.get_running_loop()
    while piece := await reader.read(1 << 16):
        loop.call_later(seconds, writer.write, piece)
    loop.call_later(seconds, writer.close)
