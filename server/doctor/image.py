"""Which of NVIDIA's Triton images fits the cards of this machine."""

from server.doctor.finding import Finding, Status
from server.gpu.images import DriverFit, ImageAdvice, advise_all
from server.gpu.nvml import Reading

_FITS = (DriverFit.FULL, DriverFit.BY_MINOR_VERSION, DriverFit.UNKNOWN)


def findings_of(reading: Reading) -> list[Finding]:
    """The image, whether the driver carries it, and a warning of its own for one with known vulnerabilities."""
    if not reading.cards:
        return [Finding("image.tag", Status.OK, "not applicable: no GPU")]
    advice = advise_all([card.capability for card in reading.cards], reading.driver)
    if advice.image is None:
        return [Finding("image.tag", Status.WARNING, f"no image fits {advice.cards}", advice.reason)]
    findings = [_tag(advice), _driver(advice, reading.driver)]
    findings += [Finding("image.security", Status.WARNING, *_halves(warning)) for warning in advice.warnings]
    return findings


def _tag(advice: ImageAdvice) -> Finding:
    later = " or later" if advice.or_later else " at most"
    return Finding("image.tag", Status.OK, f"{advice.image}{later} for {advice.cards}: {advice.reason}")


def _driver(advice: ImageAdvice, driver: str | None) -> Finding:
    found = f"driver {driver or 'unknown'} for CUDA {advice.cuda}: {advice.driver_fit}; it needs {advice.driver_needed}"
    if advice.driver_fit in _FITS:
        return Finding("image.driver", Status.OK, found)
    if advice.driver_fit is DriverFit.BY_PACKAGE:
        return Finding("image.driver", Status.NOTE, found, "a driver of branch 580 serves every card since Pascal")
    return Finding("image.driver", Status.WARNING, found, "install a driver of branch 580 (long-term support)")


def _halves(sentence: str) -> tuple[str, str]:
    found, _, advice = sentence.partition(": ")
    return found, advice
