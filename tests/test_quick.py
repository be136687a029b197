"""What ``make test QUICK=1`` runs: files that exist, and of every folder of tests at least one."""

from pathlib import Path

from tests.support.quick import quick_files

TESTS = Path(__file__).parent
NO_TESTS = {"support", "data", "__pycache__"}


def test_the_quick_files_exist_and_cover_every_folder():
    listed = quick_files()
    missing = sorted(name for name in listed if not (TESTS / name).is_file())
    assert not missing, f"tests/quick.txt lists files that are not there: {missing}"
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - NO_TESTS
    assert folders - {name.partition("/")[0] for name in listed} == set()
