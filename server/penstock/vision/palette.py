"""Colours of boxes and their labels, for pictures, videos and pages."""

Color = tuple[int, int, int]  # red, green, blue

# Found by a search: as far apart as possible for normal, protan, deutan and tritan vision, neighbours in this order
# most of all; bright enough for dark text, and clearly different from ALARM and white.
PALETTE: tuple[Color, ...] = (
    (80, 220, 240),
    (180, 200, 120),
    (200, 100, 160),
    (100, 180, 255),
    (240, 140, 0),
    (160, 255, 180),
    (120, 120, 255),
    (240, 240, 0),
    (255, 160, 180),
    (60, 160, 120),
)
INK: Color = (22, 22, 22)
WHITE: Color = (255, 255, 255)
ALARM: Color = (240, 75, 60)


def color_of(number: int) -> Color:
    """The colour of a class or track; the same for the same number. Nine consecutive numbers have different ones.

    Shifted by one each round, so that 0, 10 and 20 differ.
    """
    return PALETTE[(number + number // len(PALETTE)) % len(PALETTE)]


def ink_on(background: Color) -> Color:
    """Dark or white, whichever is easier to read on the background."""
    red, green, blue = background
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else WHITE
