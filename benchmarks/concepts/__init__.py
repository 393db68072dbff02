"""The pictures of docs/concepts, drawn by `python -m benchmarks.concepts` from computed steps and recorded data."""
