"""No pickles, no network: read from the sources, and watched while commands run."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_paradyse
from megatron_paradyse.errors import UserError
from megatron_paradyse.train import megatron_version

ROOT = Path(megatron_paradyse.__file__).parent
NETWORK = {"http", "urllib", "ftplib", "smtplib", "requests", "aiohttp", "httpx", "xmlrpc"}
UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Calls that unpickle what they are given or run it as code.
CALLS = {"load_state_dict_from_url", "all_gather_object", "broadcast_object_list", "eval", "exec"}
CALLS |= {"gather_object", "scatter_object_list", "recv_object_list", "full_load", "unsafe_load"}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_unpickles_evaluates_or_goes_to_the_network(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & (NETWORK | UNPICKLES)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            assert name not in CALLS, f"line {node.lineno}: {name}"
            if ast.unparse(node.func) in ("torch.load", "yaml.load", "np.load", "numpy.load"):
                pytest.fail(f"line {node.lineno}: {ast.unparse(node)}")


WATCHED = """
import sys
def watch(event, arguments):
    if event.startswith(("socket.connect", "socket.getaddrinfo", "urllib", "http.client")):
        print("NETWORK", event, arguments, file=sys.stderr)
        sys.stderr.flush()
        import os
        os._exit(9)
sys.addaudithook(watch)
from megatron_paradyse.cli import cli
cli(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("data", "synthesize", "--output-prefix", "d", "--distribution", "githubcode"),
        ("schema", "settings"),
        ("train", "configs/train-demo.yaml", "--dry-run"),
    ],
    ids=" ".join,
)
def test_commands_never_look_up_a_host(arguments, tmp_path):
    if arguments[0] == "data":
        arguments = (*arguments[:3], str(tmp_path / "d"), *arguments[4:], "--documents", "5")
    result = subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT.parent,
        timeout=120,
        check=False,
    )
    assert "NETWORK" not in result.stderr and result.returncode == 0, result.stderr


def test_the_installed_megatron_is_supported_and_others_are_refused(tmp_path, monkeypatch):
    megatron_version.check_megatron()
    found = megatron_version.find_megatron()
    assert found is not None and megatron_version.is_wheel(found[1])
    assert not megatron_version.is_wheel(tmp_path)
    for version in ((0, 18, 0), (0, 20, 0), (1, 19, 0)):
        core = tmp_path / str(version[1]) / str(version[0]) / "megatron" / "core"
        core.mkdir(parents=True)
        lines = (f"{n} = {v}\n" for n, v in zip(("MAJOR", "MINOR", "PATCH"), version, strict=True))
        (core / "package_info.py").write_text("".join(lines))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(core.parents[1])])
            for name in [n for n in sys.modules if n.split(".")[0] == "megatron"]:
                patch.delitem(sys.modules, name)
            text = ".".join(map(str, version))
            with pytest.raises(UserError, match=rf"megatron.core {text} is installed, .* 0.19.x"):
                megatron_version.check_megatron()
