"""What is wrong with the texts of a figure."""

from matplotlib.figure import Figure
from matplotlib.text import Text


def collisions(figure: Figure) -> list[str]:
    """What is wrong with the text of a figure: texts that overlap one another or leave the canvas."""
    figure.draw_without_rendering()
    canvas = figure.bbox
    boxes = [(text.get_text(), text.get_window_extent()) for text in _shown(figure)]
    wrong = [
        f"{text!r} leaves the canvas"
        for text, box in boxes
        if box.x0 < canvas.x0 or box.y0 < canvas.y0 or box.x1 > canvas.x1 or box.y1 > canvas.y1
    ]
    for i, (one, a) in enumerate(boxes):
        wrong += [f"{one!r} overlaps {other!r}" for other, b in boxes[i + 1 :] if a.padded(-1).overlaps(b.padded(-1))]
    return wrong


def _shown(figure: Figure) -> list[Text]:
    """The texts that are drawn; of ticks, those within the limits."""
    axes = [(part.xaxis, part.yaxis) for part in figure.axes]
    axis_texts = {id(text) for pair in axes for axis in pair for text in axis.findobj(Text)}
    texts = [text for text in figure.findobj(Text) if id(text) not in axis_texts]
    for axis in (axis for pair in axes for axis in pair):
        low, high = sorted(axis.get_view_interval())
        slack = (high - low) * 1e-9
        ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=False)
        texts += [axis.label, axis.offsetText]
        texts += [label for place, label in ticks if low - slack <= place <= high + slack]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]
