"""The golden cases of the public reference code on the device: float32 token for token, bfloat16 by how much agrees.

In bfloat16 near ties fall otherwise, and a token that differs changes all that follow. So given whole canvases,
too, are compared: by the best token of each position, and by the log of the sum of exponentials.
"""

import tempfile
from pathlib import Path

from bench.gpu.setup import Setting
from dlmserve import LLM
from tests import golden_data

FILES = (("llada", "public_llada"), ("dream", "public_dream"))


def measure(setting: Setting) -> dict:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family, file in FILES:
            cases = golden_data.load(f"{family}/{file}.json")
            traces = [trace for trace in cases["traces"] if not golden_data.is_capped(trace)]
            if setting.small:
                traces = sorted(traces, key=lambda trace: len(trace["trace"]))[:2]
            folders = {
                name: str(golden_data.write_checkpoint(f"{family}/model_{name}", Path(folder, family, name)))
                for name in sorted({case["model"] for case in [*traces, *cases["logits"]]})
            }
            for dtype in ("float32", "bfloat16"):
                device = "cuda" if setting.on_gpu else "cpu"
                llms = {name: LLM(path, device=device, dtype=dtype) for name, path in folders.items()}
                rows.append(
                    {"family": family, "dtype": dtype, "details": next(iter(llms.values())).details}
                    | _logits(llms, cases["logits"])
                    | _traces(llms, traces)
                )
    return {"rows": rows}


def _logits(llms: dict[str, LLM], cases: list[dict]) -> dict:
    """Share of positions whose best token is the reference's, and the largest error of a log-sum."""
    num_equal = num_positions = 0
    worst = 0.0
    for case in cases:
        logits = llms[case["model"]].logits(case["ids"]).cpu()
        num_equal += sum(a == b for a, b in zip(logits.argmax(-1).tolist(), case["argmax"], strict=True))
        num_positions += len(case["argmax"])
        errors = zip(logits.logsumexp(-1).tolist(), case["logsumexp"], strict=True)
        worst = max(worst, *(abs(got - wanted) for got, wanted in errors))
    return {"equal_argmax": num_equal / num_positions, "worst_logsumexp": worst}


def _traces(llms: dict[str, LLM], traces: list[dict]) -> dict:
    num_equal_traces = num_equal = num_tokens = 0
    for trace in traces:
        completions = golden_data.run(llms[trace["model"]], trace)
        pairs = list(zip(completions, golden_data.finals(trace), strict=True))
        num_equal_traces += all(completion.token_ids == final for completion, final in pairs)
        for completion, final in pairs:
            num_equal += sum(a == b for a, b in zip(completion.token_ids, final, strict=True))
            num_tokens += len(final)
    return {
        "traces": len(traces),
        "equal_traces": num_equal_traces,
        "equal_tokens": num_equal / num_tokens,
    }


def lines(result: dict) -> list[str]:
    return [
        f"{row['family']:6} {row['dtype']:9}{row['equal_traces']:4d} of {row['traces']} traces, "
        f"{row['equal_tokens']:.1%} of tokens, {row['equal_argmax']:.1%} of best tokens of given canvases equal; "
        f"log-sums within {row['worst_logsumexp']:.1e}; {row['details']}"
        for row in result["rows"]
    ]
