"""From a folder of JSON lines to batches, by nothing but the commands that ``tokenloom init`` prints."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from support.corpora import text_rows, write_jsonl
from support.server_process import CommandLine, ServerProcess


def test_the_printed_commands_work_as_they_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shard in range(2):
        write_jsonl(tmp_path / "data" / f"web-{shard}.jsonl", text_rows(60, shard, 60))
    command = CommandLine(tmp_path)
    done = command("init", "data", "--tokenizer", "bytes")
    assert done.status == 0, done.output
    validate, plan, serve = (
        shlex.split(line, comments=True)[1:]
        for line in re.findall(r"^  (tokenloom .*)$", done.output, re.MULTILINE)
    )
    assert (validate[0], plan[0], serve[0]) == ("validate", "plan", "serve")
    for each in (validate, plan):
        ended = command(*each)
        assert ended.status == 0, ended.output
    lines = done.output[done.output.index("  from tokenloom") :].splitlines()
    script = "\n".join(line[2:] for line in lines if line.startswith("  "))
    server = ServerProcess(tmp_path / "server", tmp_path / serve[1]).start()
    try:
        # Others on this machine may have the port that is printed.
        (tmp_path / "train.py").write_text(script.replace("127.0.0.1:50051", server.grpc))
        runpy.run_path(str(tmp_path / "train.py"))
    finally:
        server.kill()
    length = re.search(r"sequence_length: (\d+)", (tmp_path / "mixture.yaml").read_text())
    assert length is not None
    assert f"torch.Size([4, {length[1]}])" in capsys.readouterr().out
