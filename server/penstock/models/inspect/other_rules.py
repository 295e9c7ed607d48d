"""Rules that recognise classifiers, embeddings, maps and text networks."""

from penstock.models.inspect.facts import TensorFacts
from penstock.models.inspect.inspection import Question
from penstock.models.inspect.model_signature import LayoutMatch, ModelSignature

_PERSON, _FACE = (256, 128), (112, 112)
_MIN_VECTOR, _MAX_VECTOR = 64, 4096
_IMAGENET = 1000
_TEXT_HEIGHTS = (32, 48)
_PASSING = (
    "Identity",
    "Constant",
    "Resize",
    "Upsample",
    "Transpose",
    "Squeeze",
    "Unsqueeze",
    "Reshape",
    "Cast",
    "Slice",
)


def _vector(model: ModelSignature) -> tuple[TensorFacts, int] | None:
    """The first output and its length, if it is one vector a picture: [B, C] or [B, C, 1, 1]."""
    output = model.facts.outputs[0]
    shape = model.shape_per_image(output)
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) != 1 or shape[0] < 2 or output.datatype is None or "FP" not in output.datatype:
        return None
    return output, shape[0]


def vector(model: ModelSignature) -> LayoutMatch | None:
    """A classifier or an embedding, by length, names, and the tail of the graph."""
    found = _vector(model)
    if found is None or len(model.facts.outputs) > 2:
        return None
    output, length = found
    tail = model.facts.tail.get(output.name, ())
    outputs = (output.name,) if len(model.facts.outputs) > 1 else ()
    if length == len(model.names) or length in (_IMAGENET, _IMAGENET + 1) or model.stated_layout == "classification":
        why = f"one output of {length} numbers" + (
            f", as many as {model.names_origin} has names" if model.names else ""
        )
        return LayoutMatch("classification", (why,), class_count=length, outputs=outputs)
    if tail[:1] and tail[0] in ("Softmax", "Sigmoid", "LogSoftmax"):
        why = f"one output of {length} numbers after a {tail[0]}: classes"
        return LayoutMatch("classification", (why,), class_count=length, outputs=outputs)
    is_usual = model.size in (_PERSON, _FACE) and length % _MIN_VECTOR == 0
    if length == 512 or is_usual or model.hints.layout == "embedding":
        return _embedding(model, output, length)
    question = Question(
        f"{length} numbers are the classes of a classifier or the vector of an embedding; points have no layout here",
        "--layout",
        ("classification", "embedding") if length < _MIN_VECTOR else ("embedding", "classification"),
    )
    return LayoutMatch(
        "classification", (f"one output of {length} numbers",), class_count=length, questions=(question,)
    )


def _embedding(model: ModelSignature, output: TensorFacts, length: int) -> LayoutMatch:
    families = {_PERSON: "re-identification", _FACE: "faces"}
    family = families.get(model.size or (0, 0), "embedding")
    seen = {"re-identification": ", of a person's 256 x 128 pixels", "faces": ", of a face's 112 x 112 pixels"}
    why = f"one output of {length} numbers without names or softmax{seen.get(family, '')}: an embedding"
    outputs = (output.name,) if len(model.facts.outputs) > 1 else ()
    return LayoutMatch("embedding", (why,), family, outputs=outputs)


def text(model: ModelSignature) -> LayoutMatch | None:
    """A text recogniser: a low, wide picture, and [T, L] with a score for each character."""
    output = model.facts.outputs[0]
    shape = model.shape_per_image(output)
    height, width = model.image.shape[-2:]
    if len(model.facts.outputs) != 1 or len(shape) != 2 or model.is_nhwc:
        return None
    count = len(model.metadata.characters)
    is_low = height in _TEXT_HEIGHTS and (width == -1 or width >= 2 * height)
    if not is_low and not (count and shape[1] in (count + 1, count + 2)) and model.hints.layout != "ctc":
        return None
    if not is_low and not count and height != -1 and model.hints.layout != "ctc":
        return None
    height = height if height > 0 else (model.size or (_TEXT_HEIGHTS[1], 0))[0]
    why = f"an input of height {height} and an output [T, {shape[1]}]: a text recogniser"
    if count and shape[1] in (count + 1, count + 2):
        listed = f"{count} characters are in the file's metadata; {shape[1]} = blank, characters, space"
        return _recogniser(model, height, (why, listed), model.metadata.characters)
    if model.names and shape[1] in (len(model.names) + 1, len(model.names) + 2):
        listed = f"{len(model.names)} characters are in {model.names_origin}"
        return _recogniser(model, height, (why, listed), model.names)
    question = Question(
        f"its {shape[1]} columns are a blank, first, and the characters that it reads, which are not in the file: pass "
        f"a file of {shape[1] - 2} lines, or {shape[1] - 1} with the blank left out",
        "--labels",
    )
    return _recogniser(model, height, (why,), (), (question,))


def _recogniser(
    model: ModelSignature,
    height: int,
    why: tuple[str, ...],
    characters: tuple[str, ...],
    questions: tuple[Question, ...] = (),
) -> LayoutMatch:
    width = model.image.shape[-1]
    card = {"padding-value": "127.5"}
    if characters:
        card["characters"] = "".join(one[:1] or " " for one in characters)
    batch = model.image.shape[0] if model.has_batch_axis else 1
    is_free = width == -1 and model.hints.input_size is None
    if is_free:
        card["min-width"] = "320"
    return LayoutMatch(
        "ctc",
        why,
        "ctc",
        card=card,
        questions=questions,
        input_shape=(batch, 3, height, width) if is_free else (),
        needs_size=False,
    )


def maps(model: ModelSignature) -> LayoutMatch | None:
    """A map of the picture: classes, depth or text regions."""
    output = next((one for one in model.facts.outputs if len(model.shape_per_image(one)) in (2, 3)), None)
    if output is None or len(model.facts.outputs) > 2:
        return None
    shape = model.shape_per_image(output)
    outputs = (output.name,) if len(model.facts.outputs) > 1 else ()
    if len(shape) == 3 and shape[2] > 0 and shape[0] > 0 and _is_last(model, shape):
        channels, plane = shape[2], (shape[0], shape[1])
    elif len(shape) == 3:
        channels, plane = shape[0], (shape[1], shape[2])
    else:
        channels, plane = 1, (shape[0], shape[1])
    if not _has_size_of_picture(model, plane) or _is_grid(model, output, shape):
        return None
    is_integer = output.datatype is not None and ("INT" in output.datatype or output.datatype == "BOOL")
    if is_integer:
        why = f"integers over the picture ({output.name} {list(shape)}): the class of each pixel"
        return LayoutMatch("semantic", (why,), outputs=outputs)
    if channels > 1:
        why = f"{channels} channels over the picture ({output.name} {list(shape)}): a score for each class and pixel"
        return _many_channels(model, output, why, channels, outputs)
    return _one_channel(model, output, outputs)


def _is_grid(model: ModelSignature, output: TensorFacts, shape: tuple[int, ...]) -> bool:
    """Whether another output has the same channels over half of the sides: grids of a detector with two strides."""
    halves = {tuple(side if axis == channels else side // 2 for axis, side in enumerate(shape)) for channels in (0, 2)}
    doubles = {tuple(side if axis == channels else side * 2 for axis, side in enumerate(shape)) for channels in (0, 2)}
    others = {model.shape_per_image(one) for one in model.facts.outputs if one is not output}
    return len(shape) == 3 and -1 not in shape and bool(others & (halves | doubles))


def _ends_in_sigmoid(model: ModelSignature, output: TensorFacts) -> bool:
    tail = model.facts.tail.get(output.name, ())
    return next((kind for kind in tail if kind not in _PASSING), "") == "Sigmoid"


def _many_channels(
    model: ModelSignature, output: TensorFacts, why: str, channels: int, outputs: tuple[str, ...]
) -> LayoutMatch:
    """The best class of each pixel; after a sigmoid, independent classes."""
    if not _ends_in_sigmoid(model, output) or model.hints.layout == "semantic":
        return LayoutMatch("semantic", (why,), class_count=channels, outputs=outputs)
    question = Question(
        "its classes are independent, so a pixel can have several or none; semantic takes the best class of each pixel",
        "--layout",
        ("semantic-multilabel", "semantic"),
        is_blocking=False,
    )
    return LayoutMatch(
        "semantic-multilabel",
        (why, "a sigmoid ends the graph: each class has the pixels over segmentation-threshold"),
        class_count=channels,
        outputs=outputs,
        questions=() if model.hints.layout else (question,),
    )


def _one_channel(model: ModelSignature, output: TensorFacts, outputs: tuple[str, ...]) -> LayoutMatch:
    """Depth, the probability of one class, or of text: [B, 1, h, w] fits all three."""
    has_sigmoid = _ends_in_sigmoid(model, output)
    why = f"one number for each pixel ({output.name})"
    layout = model.stated_layout
    if layout in ("depth", "semantic", "db"):
        return _map_match(model, layout, (why,), outputs)
    if has_sigmoid and model.is_size_free and len(model.shape_per_image(output)) == 3:
        seen = "after a sigmoid, of pictures of any size: PaddleOCR's text detector"
        if _is_paddle(model):
            return _map_match(model, "db", (why, seen), outputs)
    after_sigmoid = ("db", "semantic", "depth") if _is_paddle(model) else ("semantic", "db", "depth")
    choices = after_sigmoid if has_sigmoid else ("depth", "semantic", "db")
    question = Question(
        "one number for each pixel is depth, the probability of one class, or of text (PaddleOCR's detector)",
        "--layout",
        choices,
    )
    return _map_match(model, choices[0], (why,), outputs, (question,))


def _is_paddle(model: ModelSignature) -> bool:
    """Whether names are those that Paddle's converter writes."""
    names = [model.image.name, *(tensor.name for tensor in model.facts.outputs)]
    paddle = ("sigmoid", "fetch_name", "save_infer_model")
    producers = (model.facts.producer, model.metadata.exporter)
    return any("paddle" in one.lower() for one in producers) or any(name.lower().startswith(paddle) for name in names)


def _map_match(
    model: ModelSignature,
    layout: str,
    why: tuple[str, ...],
    outputs: tuple[str, ...],
    questions: tuple[Question, ...] = (),
) -> LayoutMatch:
    is_text = layout == "db"
    return LayoutMatch(
        layout,
        why,
        "db" if is_text else "",
        class_count=1 if layout == "semantic" else 0,
        outputs=outputs,
        card={"segmentation-threshold": "0.3", "pre-cluster-threshold": "0.5"} if is_text else {},
        questions=questions,
        needs_size=not (is_text and model.is_size_free),
    )


def _is_last(model: ModelSignature, shape: tuple[int, ...]) -> bool:
    """Whether the channels are the last axis: the first two sides fit the picture, the last two do not."""
    return model.is_nhwc or (_has_size_of_picture(model, shape[:2]) and not _has_size_of_picture(model, shape[1:]))


def _has_size_of_picture(model: ModelSignature, plane: tuple[int, ...]) -> bool:
    """Whether h and w are a part of H and W, from a sixty-fourth to four times."""
    if -1 in plane or model.size is None:
        return plane[0] == plane[1] == -1 or (-1 not in plane and model.is_size_free)
    ratios = [own / side for own, side in zip(plane, model.size, strict=True)]
    return min(ratios) >= 1 / 33 and max(ratios) <= 4 and max(ratios) / min(ratios) < 1.3
