"""A few questions of our own in the format of each zero-shot task, as the hub ships it and as its publisher does."""

from typing import Any

Records = list[dict[str, Any]]


def _arc(question: str, answer: str, labels: str, *texts: str) -> dict[str, Any]:
    return {"id": "own", "question": question, "choices": {"text": [*texts], "label": [*labels]}, "answerKey": answer}


def _hellaswag(label: str, activity: str, a: str, b: str, *endings: str) -> dict[str, Any]:
    return {"activity_label": activity, "ctx_a": a, "ctx_b": b, "endings": [*endings], "label": label}


ARC: Records = [
    _arc("Which of these falls when a cat pushes it off a table?", "A", "ABC", "a cup", "the moon", "a shadow"),
    _arc("What do plants need in order to grow?", "3", "12345", "music", "paint", "light", "sand", "glass"),
    _arc("Water that is very cold becomes", "D", "ABCD", "steam", "a gas", "ice cold milk", "ice"),
]
HELLASWAG: Records = [
    _hellaswag(
        "0", "Feeding a dog", "A man opens a tin.", "the dog",
        "eats what is in it.", "opens a shop.", "[substeps] reads  the tin.", "[title] is a tin.",
    ),
    _hellaswag(
        "1", "Personal Care", "[header] How to wash your hands [title] Use water. [step] Turn the tap.", "",
        "Sing.", "Take the soap, and rub.", "Leave at once – really.", "Eat the soap.",
    ),
]  # fmt: skip
_GAP = "The cup did not fit into the box because the _ was too small."
WINOGRANDE: Records = [
    {"sentence": _GAP, "option1": "cup", "option2": "box", "answer": "2"},
    {"sentence": "Mary gave Anna a book, and _ thanked her.", "option1": "Mary", "option2": "Anna", "answer": "2"},
]
_ICE = "Ice -- Ice is water that has frozen. It is colder than water."
_CAT = "Cat -- The cat is a mammal. Its young are born alive."
BOOLQ: Records = [
    {"question": "is ice made of water", "passage": _ICE, "idx": 0, "label": 1},
    {"question": "do cats lay eggs", "passage": _CAT, "idx": 1, "label": 0},
]


def _published(record: dict[str, Any]) -> dict[str, Any]:
    """A question of the hub as its publisher has it."""
    if "choices" in record:
        pairs = zip(record["choices"]["text"], record["choices"]["label"], strict=True)
        choices = [{"text": text, "label": label} for text, label in pairs]
        return {"question": {"stem": record["question"], "choices": choices}, "answerKey": record["answerKey"]}
    if "endings" in record:
        return {**record, "label": int(record["label"])}
    if "passage" in record:
        return {"question": record["question"], "answer": bool(record["label"]), "passage": record["passage"]}
    return {"qID": "own", **record}


RECORDS: dict[str, list[Records]] = {
    name: [records, list(map(_published, records))]
    for name, records in {
        "arc_easy": ARC, "arc_challenge": ARC[:2], "boolq": BOOLQ, "hellaswag": HELLASWAG, "winogrande": WINOGRANDE,
    }.items()
}  # fmt: skip
"""By task: the records of the hub, and those of the publisher, of the same questions."""
