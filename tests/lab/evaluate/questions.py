"""A few questions of our own in the format of each zero-shot task, as the hub ships it and as its publisher does."""

from typing import Any

Records = list[dict[str, Any]]

ARC: Records = [
    {
        "id": "own_1",
        "question": "Which of these falls when a cat pushes it off a table?",
        "choices": {"text": ["a cup", "the moon", "a shadow"], "label": ["A", "B", "C"]},
        "answerKey": "A",
    },
    {
        "id": "own_2",
        "question": "What do plants need in order to grow?",
        "choices": {"text": ["music", "paint", "light", "sand", "glass"], "label": ["1", "2", "3", "4", "5"]},
        "answerKey": "3",
    },
    {
        "id": "own_3",
        "question": "Water that is very cold becomes",
        "choices": {"text": ["steam", "a gas", "ice cold milk", "ice"], "label": ["A", "B", "C", "D"]},
        "answerKey": "D",
    },
]
ARC_PUBLISHED: Records = [
    {
        "id": record["id"],
        "question": {
            "stem": record["question"],
            "choices": [
                {"text": text, "label": label}
                for text, label in zip(record["choices"]["text"], record["choices"]["label"], strict=True)
            ],
        },
        "answerKey": record["answerKey"],
    }
    for record in ARC
]

HELLASWAG: Records = [
    {
        "ind": 1,
        "activity_label": "Feeding a dog",
        "ctx_a": "A man opens a tin.",
        "ctx_b": "the dog",
        "ctx": "A man opens a tin. the dog",
        "endings": ["eats what is in it.", "opens a shop.", "[substeps] reads  the tin.", "[title] is a tin."],
        "source_id": "own~1",
        "split": "val",
        "split_type": "indomain",
        "label": "0",
    },
    {
        "ind": 2,
        "activity_label": "Personal Care",
        "ctx_a": "[header] How to wash your hands [title] Use water. [step] Turn the tap.",
        "ctx_b": "",
        "ctx": "[header] How to wash your hands [title] Use water. [step] Turn the tap.",
        "endings": ["Sing.", "Take the soap, and rub.", "Leave at once – really.", "Eat the soap."],
        "source_id": "own~2",
        "split": "val",
        "split_type": "zeroshot",
        "label": "1",
    },
]
HELLASWAG_PUBLISHED: Records = [{**record, "label": int(record["label"])} for record in HELLASWAG]

WINOGRANDE: Records = [
    {
        "sentence": "The cup did not fit into the box because the _ was too small.",
        "option1": "cup",
        "option2": "box",
        "answer": "2",
    },
    {
        "sentence": "Mary gave Anna a book, and _ thanked her.",
        "option1": "Mary",
        "option2": "Anna",
        "answer": "2",
    },
]
WINOGRANDE_PUBLISHED: Records = [{"qID": f"own-{i}", **record} for i, record in enumerate(WINOGRANDE)]

BOOLQ: Records = [
    {
        "question": "is ice made of water",
        "passage": "Ice -- Ice is water that has frozen. It is colder than water.",
        "idx": 0,
        "label": 1,
    },
    {
        "question": "do cats lay eggs",
        "passage": "Cat -- The cat is a mammal. Its young are born alive.",
        "idx": 1,
        "label": 0,
    },
]
BOOLQ_PUBLISHED: Records = [
    {"question": record["question"], "title": "own", "answer": bool(record["label"]), "passage": record["passage"]}
    for record in BOOLQ
]

RECORDS: dict[str, list[Records]] = {
    "arc_easy": [ARC, ARC_PUBLISHED],
    "arc_challenge": [ARC[:2], ARC_PUBLISHED[:2]],
    "boolq": [BOOLQ, BOOLQ_PUBLISHED],
    "hellaswag": [HELLASWAG, HELLASWAG_PUBLISHED],
    "winogrande": [WINOGRANDE, WINOGRANDE_PUBLISHED],
}
"""By task: the records of the hub, and those of the publisher, of the same questions."""
