"""Tokens at rest, limits of one login, and a token file that changes under a running verifier."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from live import alone, ask, drafter, edge, hear, run, same, server
from outrider import cli
from outrider.commands.errors import CommandError
from outrider.commands.remote import bearer_token
from outrider.core.tokens import SamplingParams
from outrider.proto.messages import Code
from outrider.runtime.access import ConfigurationError, Logins, hash_token, hashed_line, read_logins
from outrider.runtime.failures import CloudError
from outrider.runtime.rotation import LoginFile
from outrider.session.quotas import Bucket, TenantLimits

SHORT = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)


def write(folder: Path, *lines: str) -> Path:
    file = folder / "tokens"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_file_holds_hashes_and_limits(tmp_path: Path):
    file = write(
        tmp_path,
        hashed_line("alice", "first"),
        hashed_line("alice", "second") + " sessions=2 rate=0.5",
        "bob:plain connections=1  # no comment",
    )
    with pytest.raises(ConfigurationError, match="line 3: no limit of that name"):
        read_logins(file)
    file = write(tmp_path, *file.read_text().splitlines()[:2], "bob:plain connections=1")
    found = read_logins(file)
    assert found.tokens == {
        hash_token("first"): "alice", hash_token("second"): "alice", hash_token("plain"): "bob"
    }  # fmt: skip
    assert found.limits == {
        "alice": TenantLimits(sessions=2, rate=0.5), "bob": TenantLimits(connections=1)
    }  # fmt: skip
    assert "first" not in repr(found)
    assert hash_token("first") not in repr(found)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("alice:sha256:SECRET", "line 2: sha256: wants 64"),
        ("alice:SECRET rate=-1", "line 2: rate is a number above 0"),
        ("alice:SECRET rate=nan", "line 2: rate is a number above 0"),
        ("alice:SECRET sessions=1.5", "line 2: sessions is a number above 0"),
        ("alice:SECRET rate=1 quota=3", "line 2: no limit of that name: there is sessions"),
        ("mallory:known", "line 2: this token is another name's already"),
    ],
)
def test_a_bad_line_is_named_by_its_number_and_not_shown(tmp_path: Path, line: str, words: str):
    with pytest.raises(ConfigurationError) as refused:
        read_logins(write(tmp_path, "bob:known", line))
    assert words in str(refused.value)
    assert "SECRET" not in str(refused.value)


def test_a_new_token_lets_in_and_its_line_does_not_tell_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.run(["token", "new", "alice", "--sessions", "3"]) == 0
    token, line = capsys.readouterr().out.splitlines()
    assert token not in line
    found = read_logins(write(tmp_path, line))
    assert found.tokens == {hash_token(token): "alice"}
    assert found.limits["alice"].sessions == 3
    cli.run(["token", "new", "alice"])
    assert capsys.readouterr().out.splitlines()[0] != token
    assert cli.run(["token", "new", "a:b"]) == 2
    assert "error: NAME" in capsys.readouterr().err


def test_an_edge_is_told_that_a_hash_is_no_token(tmp_path: Path):
    with pytest.raises(CommandError, match="holds the hash of a token"):
        bearer_token(write(tmp_path, hashed_line("alice", "secret")))
    assert bearer_token(write(tmp_path, "alice:secret sessions=1")) == "secret"


def test_a_bucket_fills_up_again():
    bucket = Bucket(2.0, 0.0)
    take = lambda count, now: bucket.take(count, rate=0.5, burst=2.0, now=now)  # noqa: E731
    assert [take(1, 0.0), take(1, 0.0), take(1, 0.0)] == [0.0, 0.0, 2.0]
    assert take(1, 2.0) == 0.0
    assert take(3, 1000.0) == float("inf"), "more than ever fits"
    assert bucket.take(1, rate=0.0, burst=2.0, now=1000.0) == 0.0


# -- a file that changes ----------------------------------------------------------------------


def test_a_changed_file_is_taken_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    told: list[Logins] = []
    file = write(tmp_path, "alice:one")
    watched = LoginFile(file, read_logins(file), told.append)
    watched.look(always=False)
    assert told == []
    write(tmp_path, "alice:one", "bob:two2")
    watched.look(always=False)
    assert set(told[0].tokens.values()) == {"alice", "bob"}
    for broken in ("", "alice:\n", "alice:SECRET rate=no\n"):
        caplog.clear()
        file.write_text(broken)
        watched.look(always=False)
        watched.look(always=False)
        assert len(told) == 1
        assert [r.levelname for r in caplog.records] == ["WARNING"], "it is said once"
        assert "the logins before it stay" in caplog.text
        assert "SECRET" not in caplog.text
    file.unlink()
    watched.look()
    assert len(told) == 1
    write(tmp_path, "bob:two2")
    watched.look()
    assert told[1].tokens == {hash_token("two2"): "bob"}


def test_a_withdrawn_token_loses_its_connection_and_others_do_not(caplog: pytest.LogCaptureFixture):
    old, new = hash_token("old"), hash_token("new")

    async def work() -> None:
        async with (
            server(tokens={old: "alice"}) as cloud,
            edge(cloud.port, drafter(), token="old") as before,
            edge(cloud.port, drafter(), token="new") as after,
        ):
            same(await hear(await before.stream(ask(SHORT))), alone(SHORT))
            cloud.admit(Logins(tokens={old: "alice", new: "alice"}))
            same(await hear(await before.stream(ask(SHORT))), alone(SHORT))
            same(await hear(await after.stream(ask(SHORT))), alone(SHORT))
            endless = SamplingParams(max_tokens=3000, seed=1, ignore_eos=True)
            stream = await before.stream(ask(endless))
            steps = aiter(stream)
            await anext(steps)
            cloud.admit(Logins(tokens={new: "alice"}))
            with pytest.raises(CloudError) as refused:
                async for _ in steps:
                    pass
            assert refused.value.code is Code.UNAUTHORIZED
            same(await hear(await after.stream(ask(SHORT))), alone(SHORT))

    with caplog.at_level(logging.INFO, "outrider.cloud"):
        run(work())
    assert "token withdrawn" in caplog.text


def test_a_login_may_have_limits_of_its_own():
    names = {hash_token("small"): "small", hash_token("big"): "big"}
    limits = {"small": TenantLimits(sessions=1, rate=1e-3, connections=1)}

    async def work() -> None:
        async with (
            server(tokens=names, limits=limits) as cloud,
            edge(cloud.port, drafter(), token="small", give_up=0.3) as small,
            edge(cloud.port, drafter(), token="small", give_up=0.3) as second,
            edge(cloud.port, drafter(), token="big") as big,
        ):
            same(await hear(await small.stream(ask(SHORT))), alone(SHORT))
            with pytest.raises(CloudError, match=r"more than 0\.001 sessions a second"):
                await hear(await small.stream(ask(SHORT)))
            with pytest.raises(CloudError, match="HTTP 503"):
                await hear(await second.stream(ask(SHORT)))
            for _ in range(2):
                same(await hear(await big.stream(ask(SHORT))), alone(SHORT))
            cloud.admit(Logins(tokens=names))
            same(await hear(await second.stream(ask(SHORT))), alone(SHORT))

    run(work())
