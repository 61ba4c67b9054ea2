"""A public load generator finds what it looks for: guidellm, run as its users run it.

`make test-load` installs it into an environment of its own and runs this file; its dependencies are none of ours.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.commands.model import models_dir
from tests.support.cluster import smollm2

pytestmark = [
    pytest.mark.load,
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.timeout(900),
    pytest.mark.skipif("GUIDELLM" not in os.environ, reason="GUIDELLM does not say where guidellm is"),
]

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 64, 16


async def run(guidellm: str, folder: Path, **options: str) -> tuple[int | None, str]:
    """Its exit code and what it wrote, with options like `profile="kind=concurrent,streams=2"`."""
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    process = await asyncio.create_subprocess_exec(
        *(guidellm, "run", "--disable-console-interactive", *arguments),
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode(errors="replace")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_guidellm_gets_every_token_that_it_asks_for(tmp_path: Path, path: str) -> None:
    async with smollm2(workers=1) as stack:
        code, output = await run(
            os.environ["GUIDELLM"],
            tmp_path,
            backend=f"kind=openai_http,target={stack.cluster.http_url},model=smollm2,request_format={path}",
            profile="kind=concurrent,streams=3",
            data=f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            constraint=f"kind=max_requests,count={REQUESTS}",
            tokenizer=f"kind=huggingface_auto,model={models_dir() / 'smollm2'}",
            output=f"kind=json,path={tmp_path / 'benchmarks.json'}",
        )
        assert code == 0, output
        assert await stack.at_rest()

    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert metrics["output_token_count"]["successful"]["total_sum"] == REQUESTS * OUTPUT_TOKENS
