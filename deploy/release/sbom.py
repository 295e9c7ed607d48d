"""Bills of materials, CycloneDX in JSON: `python -m deploy.release.sbom --out DIR` writes one for each image.

Each lists the Python packages that the locks put into the image, with the hashes that the locks accept, and the Triton
that a wheel carries. What the base image holds is not in it: a scan of the built image finds that. Twice made of the
same locks they are the same bytes; SOURCE_DATE_EPOCH, where it is set, is their time.
"""

import argparse
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.release.images import IMAGES, Image
from deploy.release.versions import CHECKOUT, project_version

PYTHON = "3.12"  # of the Dockerfile's default base
# What the wheel nvidia-pytriton 0.7.0 carries, beside its Python.
TRITON_WHEEL, TRITON_VERSION = "nvidia-pytriton", "2.51.0"
_LONGEST_NAME = 60  # of a licence; longer is its text
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "penstock/sbom")


def components_of(lock: str, *, scope: ComponentScope = ComponentScope.REQUIRED) -> Iterator[Component]:
    """The packages that a lock's text installs on Linux, x86-64, with PYTHON."""
    for entry in lock.replace("\\\n", " ").splitlines():
        if entry.strip() and not entry.lstrip().startswith("#"):
            stated, *hashes = re.split(r"\s+--hash=sha256:", entry.strip())
            requirement = Requirement(stated)
            if requirement.marker is None or requirement.marker.evaluate(_ENVIRONMENT):
                yield _component(requirement, hashes, scope)


_ENVIRONMENT = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "implementation_name": "cpython",
    "implementation_version": f"{PYTHON}.0",
    "platform_python_implementation": "CPython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
}


def _component(requirement: Requirement, hashes: Iterable[str], scope: ComponentScope) -> Component:
    name = canonicalize_name(requirement.name)
    (specifier,) = requirement.specifier
    purl = PackageURL("pypi", name=name, version=specifier.version)
    triton = f"tritonserver@{TRITON_VERSION}"
    carried = Component(type=ComponentType.APPLICATION, name="tritonserver", version=TRITON_VERSION, bom_ref=triton)
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=specifier.version,
        scope=scope,
        purl=purl,
        bom_ref=purl.to_string(),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=content.strip()) for content in hashes],
        licenses=_licences(name, specifier.version),
        components=[carried] if name == TRITON_WHEEL else [],
    )


def _licences(name: str, version: str) -> list[License]:
    """What the installed package of this very version says of itself; nothing where none is installed."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return []
    if found.version != version:
        return []
    classifiers = found.metadata.get_all("Classifier") or []
    stated = [
        *(found.metadata.get_all("License-Expression") or []),
        *(text for text in found.metadata.get_all("License") or [] if len(text) < _LONGEST_NAME and "\n" not in text),
        *(line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: ")),
    ]
    return [LicenseFactory().make_from_string(text) for text in stated[:1]]


def bill_of(image: Image, version: str, *, made_at: datetime | None = None, checkout: Path = CHECKOUT) -> str:
    """The image's bill of materials as JSON. made_at: its time; without it none stands there."""
    found: dict[str, Component] = {}
    scopes = [(lock, ComponentScope.REQUIRED) for lock in image.locks]
    scopes += [(lock, ComponentScope.OPTIONAL) for lock in image.optional_locks]
    for lock, scope in scopes:
        for component in components_of((checkout / "requirements" / lock).read_text(encoding="utf-8"), scope=scope):
            found.setdefault(str(component.bom_ref), component)
    return _written(image, version, list(found.values()), made_at)


def _written(image: Image, version: str, components: list[Component], made_at: datetime | None) -> str:
    container = Component(
        type=ComponentType.CONTAINER, name=image.name, version=version, bom_ref=f"{image.name}:{version}"
    )
    ours = Component(
        type=ComponentType.APPLICATION,
        name="penstock",
        version=version,
        bom_ref=f"penstock@{version}",
        licenses=[LicenseFactory().make_from_string("Apache-2.0")],
    )
    notes = {
        "penstock:hashes": "those of every file that the lock accepts for the package; one of them is installed",
        "penstock:left-out": "the base image and Debian's packages",
    }
    metadata = BomMetaData(
        component=container,
        timestamp=made_at,
        properties=[Property(name=name, value=value) for name, value in notes.items()],
    )
    metadata.timestamp = made_at  # type: ignore[assignment]  # the constructor takes now for none
    bom = Bom(metadata=metadata, components=[ours, *components])
    bom.register_dependency(container, bom.components)
    bom.serial_number = uuid.uuid5(_NAMESPACE, "\n".join([image.name, version, *sorted(map(_identity, components))]))
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _identity(component: Component) -> str:
    return " ".join([str(component.bom_ref), *sorted(found.content for found in component.hashes)])


def main() -> None:
    """Writes NAME.cdx.json into the folder, for each image."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder, made if need be")
    chosen = parser.parse_args()
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    made_at = datetime.fromtimestamp(int(epoch), UTC) if epoch else None
    chosen.out.mkdir(parents=True, exist_ok=True)
    for image in IMAGES:
        bill = bill_of(image, project_version(), made_at=made_at)
        (chosen.out / f"{image.name}.cdx.json").write_text(bill, encoding="utf-8")


if __name__ == "__main__":
    main()
