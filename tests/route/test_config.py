"""Settings of the router: mistakes are found, all of them, on their lines; the commands say so."""

import json
import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.route.config import RouteConfigError, read_config, toml_lines

GOOD = """\
[targets.strong]
url = "https://api.example/v1"
model = "big"
[targets.strong.tiers.default]
input = 3.0
[targets.strong.tiers.fast]
input = 6.0
[targets.small]
url = "http://127.0.0.1:8000/v1"
[routes.auto]
policy = "fixed"
fallbacks = ["strong/fast", "small"]
"""


def problems(text: str) -> list[tuple[int, str]]:
    with pytest.raises(RouteConfigError) as refused:
        read_config(text)
    return [(problem.line, problem.message) for problem in refused.value.problems]


def test_every_mistake_is_reported_with_its_line():
    text = GOOD.replace("input = 6.0", "input = -6.0").replace('model = "big"', 'modle = "big"')
    assert [line for line, _ in problems(text)] == [3, 7]


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('"small"]', '"none"]', 12, "there is no target 'none'"),
        ("strong/fast", "strong/slow", 12, "has no tier 'slow'"),
        ("https://api.example/v1", "file:///etc/passwd", 2, "http:// or https://"),
        ("https://api.example/v1", "https://me:pw@api.example", 2, "password"),
        ('url = "https://api.example/v1"', 'headers = {"A" = "b\\r\\nC: d"}\nurl = "http://x"', 2, "no header"),
        ('url = "https://api.example/v1"', 'headers = {Authorization = "x"}\nurl = "http://x"', 2, "key_env"),
        ('model = "big"', 'engine = "smollm2"', 1, "either url or engine"),
        ("input = 3.0", 'request = {model = "other"}', 5, "must not set model"),
        ('policy = "fixed"', 'policy = "fixed"\nmodel = [', 13, ""),
    ],
)
def test_contradictions_stand_on_their_lines(old, new, line, says):
    found = problems(GOOD.replace(old, new))
    assert found[0][0] == line
    assert says in found[0][1]


words = st.text("abc_-", min_size=1, max_size=4)
values = st.sampled_from(["1", '"a = b"', '"""\n[x]\ny = 1\n"""', "[\n  1,\n  2,\n]", "{a = 1, b = 2}", "'''\n#'''"])
tables = st.lists(st.tuples(words, st.dictionaries(words, values, max_size=3)), max_size=4, unique_by=lambda t: t[0])


@given(tables, st.integers(0, 2))
def test_lines_point_at_their_keys(tables, array):
    lines, expected = [], {}
    for i, (name, keys) in enumerate(tables):
        lines.append(f"[[{name}]]" if i < array else f"[{name}]  # [not.this]")
        place = (name, 0) if i < array else (name,)
        expected[place] = len(lines)
        for key, value in keys.items():
            expected[*place, key] = len(lines) + 1
            lines += f"{key} = {value}".split("\n")
    text = "\n".join(lines)
    tomllib.loads(text)
    found = toml_lines(text)
    assert {place: found[place] for place in expected} == expected


def test_check_prints_every_mistake_and_dry_runs_a_request(tmp_path):
    from click.testing import CliRunner

    from slipstream.cli import app

    path = tmp_path / "route.toml"
    path.write_text(GOOD.replace('policy = "fixed"', 'policy = "fixd"'))
    done = CliRunner().invoke(app, ["route", "check", str(path)])
    assert done.exit_code == 1
    assert f"{path}:11: routes.auto.policy: there is no policy 'fixd'" in done.output
    path.write_text(GOOD)
    request = tmp_path / "request.json"
    body = {"model": "auto", "max_tokens": 5, "system": "s", "messages": [{"role": "user", "content": "hi"}]}
    request.write_text(json.dumps(body | {"metadata": {"user_id": "u"}}))
    done = CliRunner().invoke(app, ["route", "check", str(path), "--request", str(request), "--json"])
    assert done.exit_code == 0
    told = json.loads(done.output)
    assert told["choice"] == {"target": "strong", "tier": "default"}
    assert told["dropped"] == ["metadata"]


def test_the_documented_settings_are_valid():
    from pathlib import Path

    from slipstream.route.gateway import make_policies

    page = (Path(__file__).parents[2] / "docs" / "route.md").read_text(encoding="utf-8")
    settings, database, limits, keys = re.findall(r"```toml\n(.*?)```", page, re.S)
    database += limits.replace("[ledger]\n", "")
    config = read_config(settings + database + keys.replace("sha256:...", "sha256:" + "0" * 64))
    assert config.ledger.url == "postgresql://router@db.internal/route"
    assert config.ledger.limits == "redis://limits.internal/0"
    assert set(make_policies(config)) == {"auto"}
    assert config.keys[0].budget.usd == 5.0
