"""What a release is made of: the formula, and what its two files must and must not have."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zipfile

import pytest
import release


def test_the_formula_names_the_source_its_digest_and_an_address_only_where_one_is_known(
    tmp_path, monkeypatch
):
    source = tmp_path / "dflash_chat-1.0.0.tar.gz"
    source.write_bytes(b"packed")
    written = release.formula(source, "https://host.invalid/dflash_chat-1.0.0.tar.gz")
    assert hashlib.sha256(b"packed").hexdigest() in written and "host.invalid" in written
    assert not re.search(r"@[A-Z0-9]+@", written)
    known = {"": 0, "https://home.invalid": 1}
    for address, lines in known.items():
        monkeypatch.setattr(release, "of_project", lambda field, its=address: its)
        assert release.formula(source, "url").count("\n  homepage ") == lines


@pytest.fixture
def made(tmp_path):
    """A function that packs a wheel and a source distribution with some files."""

    def pack(in_wheel, in_source):
        wheel, source = tmp_path / "a.whl", tmp_path / "a.tar.gz"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in in_wheel:
                archive.writestr(name, "")
        with tarfile.open(source, "w:gz") as archive:
            for name in in_source:
                archive.addfile(tarfile.TarInfo(f"dflash_chat-1.0.0/{name}"))
        return release.look_into(wheel, source)

    return pack


def test_what_a_wheel_lacks_or_should_not_have_is_found(made):
    whole = [name + "x" * name.endswith("/") for name in release.IN_WHEEL]
    assert made(whole, release.IN_SDIST) == []
    (lacks,) = made(whole[1:], release.IN_SDIST)
    assert whole[0] in lacks
    (has,) = made([*whole, "kernels_metal/emulator/a.py"], release.IN_SDIST)
    assert "kernels_metal/emulator/" in has
    (lacks,) = made(whole, release.IN_SDIST[1:])
    assert release.IN_SDIST[0] in lacks
