"""`slipstream serve`, `tiers` and `top` as a user runs them."""

import json

import pytest

from slipstream.cli import main


def run(capsys, *args):
    with pytest.raises(SystemExit) as done:
        main(args)
    out, err = capsys.readouterr()
    return done.value.code, out, err


def test_others_are_not_let_in_without_a_key(capsys):
    code, _, err = run(capsys, "serve", "smollm2", "--host", "0.0.0.0")
    assert code == 2
    assert "--api-key" in err
    assert err.count("\n") == 1


def test_tiers_are_explained_from_settings_and_by_a_server(capsys, tiny, tmp_path):
    settings = tmp_path / "serve.toml"
    settings.write_text("[prices]\ninput = 1\noutput = 10\n")
    amounts = ("--input", "1000", "--output", "100")
    code, out, _ = run(capsys, "tiers", "explain", "--config", str(settings), *amounts, "--json")
    costs = {quote["tier"]: quote["cost_usd"] for quote in json.loads(out)["tiers"]}
    assert code == 0
    assert costs == {"ultrafast": 0.012, "priority": 0.004, "default": 0.002, "flex": 0.001}
    code, out, _ = run(capsys, "tiers", "explain", "--url", tiny.url, *amounts)
    assert code == 0
    assert "default *" in out
    assert "0.0 s" in out


def test_top_shows_what_runs(capsys, slow_llm):
    from serving import serving

    with serving(slow_llm) as running:
        call = {"model": running.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 400}
        stream = running.openai().chat.completions.create(**call, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        code, out, _ = run(capsys, "top", "--url", running.url, "--once")
        stream.close()
    assert code == 0
    assert "1 busy" in out
    assert "running" in out


def test_a_server_that_is_not_there_is_one_line(capsys):
    code, _, err = run(capsys, "top", "--url", "http://127.0.0.1:9", "--once")
    assert code == 2
    assert "slipstream serve" in err
    assert err.count("\n") == 1
