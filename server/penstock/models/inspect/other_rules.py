"""Rules that recognise what is no detector: classes, embeddings, maps, text."""

from penstock.models.inspect.facts import TensorFacts
from penstock.models.inspect.inspection import Question
from penstock.models.inspect.subject import Guess, Subject

_PERSON, _FACE = (256, 128), (112, 112)
_LEAST_VECTOR, _MOST_VECTOR = 64, 4096
_IMAGENET = 1000
_TEXT_HEIGHTS = (32, 48)
_MOST_LABELS = 30_000


def _vector(subject: Subject) -> tuple[TensorFacts, int] | None:
    """The first output and its length, if it is one vector a picture: [B, C] or [B, C, 1, 1]."""
    output = subject.facts.outputs[0]
    shape = subject.one(output)
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) != 1 or shape[0] < 2 or output.datatype is None or "FP" not in output.datatype:
        return None
    return output, shape[0]


def vector(subject: Subject) -> Guess | None:
    """A classifier or an embedding, by length, names, and the tail of the graph."""
    found = _vector(subject)
    if found is None or len(subject.facts.outputs) > 2:
        return None
    output, length = found
    tail = subject.facts.tail.get(output.name, ())
    outputs = (output.name,) if len(subject.facts.outputs) > 1 else ()
    if length == len(subject.names) or length in (_IMAGENET, _IMAGENET + 1) or subject.hints.layout == "classification":
        why = f"one output of {length} numbers" + (
            f", as many as {subject.names_origin} has names" if subject.names else ""
        )
        return Guess("classification", (why,), class_count=length, outputs=outputs)
    if tail[:1] and tail[0] in ("Softmax", "Sigmoid", "LogSoftmax"):
        why = f"one output of {length} numbers after a {tail[0]}: classes"
        return Guess("classification", (why,), class_count=length, outputs=outputs)
    if length == 512 or subject.size in (_PERSON, _FACE) or subject.hints.layout == "embedding":
        return _embedding(subject, output, length)
    question = Question(
        f"{length} numbers are the classes of a classifier or the vector of an embedding",
        "--layout",
        ("classification", "embedding") if length < _LEAST_VECTOR else ("embedding", "classification"),
    )
    return Guess("classification", (f"one output of {length} numbers",), class_count=length, questions=(question,))


def _embedding(subject: Subject, output: TensorFacts, length: int) -> Guess:
    families = {_PERSON: "re-identification", _FACE: "faces"}
    family = families.get(subject.size or (0, 0), "embedding")
    seen = {"re-identification": ", of a person's 256 x 128 pixels", "faces": ", of a face's 112 x 112 pixels"}
    why = f"one output of {length} numbers without names or softmax{seen.get(family, '')}: an embedding"
    outputs = (output.name,) if len(subject.facts.outputs) > 1 else ()
    return Guess("embedding", (why,), family, outputs=outputs)


def text(subject: Subject) -> Guess | None:
    """A text recogniser: a low, wide picture, and [T, L] with a score for each character."""
    output = subject.facts.outputs[0]
    shape = subject.one(output)
    height, width = subject.image.shape[-2:]
    if len(subject.facts.outputs) != 1 or len(shape) != 2 or subject.is_nhwc:
        return None
    count = len(subject.metadata.characters)
    is_low = height in _TEXT_HEIGHTS and (width == -1 or width >= 2 * height)
    if not is_low and not (count and shape[1] in (count + 1, count + 2)) and subject.hints.layout != "ctc":
        return None
    if not is_low and not count and height != -1 and subject.hints.layout != "ctc":
        return None
    height = height if height > 0 else (subject.size or (_TEXT_HEIGHTS[1], 0))[0]
    why = f"an input of height {height} and an output [T, {shape[1]}]: a text recogniser"
    if count and shape[1] in (count + 1, count + 2):
        listed = f"{count} characters are in the file's metadata; {shape[1]} = blank, characters, space"
        return _recogniser(subject, height, (why, listed), subject.metadata.characters)
    if subject.names and shape[1] in (len(subject.names) + 1, len(subject.names) + 2):
        listed = f"{len(subject.names)} characters are in {subject.names_origin}"
        return _recogniser(subject, height, (why, listed), subject.names)
    question = Question(
        f"its {shape[1]} columns are a blank and the characters that it reads, which are not in the file: give "
        f"a file of {shape[1] - 2} lines, or {shape[1] - 1} with the blank left out",
        "--labels",
    )
    return _recogniser(subject, height, (why,), (), (question,))


def _recogniser(
    subject: Subject,
    height: int,
    why: tuple[str, ...],
    characters: tuple[str, ...],
    questions: tuple[Question, ...] = (),
) -> Guess:
    width = subject.image.shape[-1]
    card = {"padding-value": "127.5"}
    if characters:
        card["characters"] = "".join(one[:1] or " " for one in characters)
    batch = subject.image.shape[0] if subject.has_batch_axis else 1
    is_free = width == -1 and subject.hints.input_size is None
    if is_free:
        card["min-width"] = "320"
    return Guess(
        "ctc",
        why,
        "ctc",
        card=card,
        questions=questions,
        input_shape=(batch, 3, height, width) if is_free else (),
        needs_size=False,
    )


def maps(subject: Subject) -> Guess | None:
    """A map of the picture: classes, depth, or the places of text."""
    output = next((one for one in subject.facts.outputs if len(subject.one(one)) in (2, 3)), None)
    if output is None or len(subject.facts.outputs) > 2:
        return None
    shape = subject.one(output)
    outputs = (output.name,) if len(subject.facts.outputs) > 1 else ()
    if len(shape) == 3 and shape[2] > 0 and shape[0] > 0 and _is_last(subject, shape):
        channels, plane = shape[2], (shape[0], shape[1])
    elif len(shape) == 3:
        channels, plane = shape[0], (shape[1], shape[2])
    else:
        channels, plane = 1, (shape[0], shape[1])
    if not _has_size_of_picture(subject, plane):
        return None
    is_whole = output.datatype is not None and ("INT" in output.datatype or output.datatype == "BOOL")
    if is_whole:
        why = f"whole numbers over the picture ({output.name} {list(shape)}): the class of each pixel"
        return Guess("semantic", (why,), outputs=outputs)
    if channels > 1:
        why = f"{channels} channels over the picture ({output.name} {list(shape)}): a score for each class and pixel"
        return Guess("semantic", (why,), class_count=channels, outputs=outputs)
    return _one_channel(subject, output, outputs)


def _one_channel(subject: Subject, output: TensorFacts, outputs: tuple[str, ...]) -> Guess:
    """Depth, one class's probability, or where text is: [B, 1, h, w] cannot tell."""
    has_sigmoid = subject.facts.tail.get(output.name, ("",))[:1] == ("Sigmoid",)
    why = f"one number for each pixel ({output.name})"
    layout = subject.hints.layout
    if layout in ("depth", "semantic", "db"):
        return _map_guess(subject, layout, (why,), outputs)
    if has_sigmoid and subject.is_size_free and len(subject.one(output)) == 3:
        seen = "after a sigmoid, of pictures of any size: PaddleOCR's text detector"
        if subject.metadata.exporter == "PaddlePaddle" or _is_paddle(subject):
            return _map_guess(subject, "db", (why, seen), outputs)
    choices = ("db", "semantic", "depth") if has_sigmoid else ("depth", "semantic", "db")
    question = Question(
        "one number for each pixel is depth, the probability of one class, or of text (PaddleOCR's detector)",
        "--layout",
        choices,
    )
    return _map_guess(subject, choices[0], (why,), outputs, (question,))


def _is_paddle(subject: Subject) -> bool:
    """Whether names are those that Paddle's converter writes."""
    names = [subject.image.name, *(tensor.name for tensor in subject.facts.outputs)]
    paddle = ("sigmoid", "fetch_name", "save_infer_model")
    return "paddle" in subject.facts.producer.lower() or any(name.lower().startswith(paddle) for name in names)


def _map_guess(
    subject: Subject, layout: str, why: tuple[str, ...], outputs: tuple[str, ...], questions: tuple[Question, ...] = ()
) -> Guess:
    is_text = layout == "db"
    return Guess(
        layout,
        why,
        "db" if is_text else "",
        class_count=1 if layout == "semantic" else 0,
        outputs=outputs,
        card={"segmentation-threshold": "0.3", "pre-cluster-threshold": "0.5"} if is_text else {},
        questions=questions,
        needs_size=not (is_text and subject.is_size_free),
    )


def _is_last(subject: Subject, shape: tuple[int, ...]) -> bool:
    """Whether the channels are the last axis: the first two sides fit the picture, the last two do not."""
    return subject.is_nhwc or (
        _has_size_of_picture(subject, shape[:2]) and not _has_size_of_picture(subject, shape[1:])
    )


def _has_size_of_picture(subject: Subject, plane: tuple[int, ...]) -> bool:
    """Whether h and w are a part of H and W, from a sixty-fourth to four times."""
    if -1 in plane or subject.size is None:
        return plane[0] == plane[1] == -1 or (-1 not in plane and subject.is_size_free)
    ratios = [own / side for own, side in zip(plane, subject.size, strict=True)]
    return min(ratios) >= 1 / 33 and max(ratios) <= 4 and max(ratios) / min(ratios) < 1.3
