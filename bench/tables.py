"""Writes README's table of measurements from bench/results/: `python -m bench.tables`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- measurements: begin (make tables) -->", "<!-- measurements: end -->"
Result = dict[str, Any]


def nanoseconds(value: float) -> str:
    for unit, size in (("ms", 1e6), ("µs", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} ns"


def timing(name: str) -> Callable[[Result], str]:
    def cell(result: Result) -> str:
        found = result.get("timings", {}).get(name)
        return f"{nanoseconds(found['median_ns'])} ±{nanoseconds(found['iqr_ns'] / 2)}"

    return cell


def ratio(result: Result, prefix: str = "") -> str:
    figures = result["figures"]
    target = figures.get(f"{prefix}target")
    goal = f" (goal ≥ {target})" if target is not None else ""
    return f"{figures[f'{prefix}ratio']:.3g}x{goal}"


CALLS = {
    "noop_function": "compiled no-op function, a call",
    "noop_module": "compiled no-op module, a call",
    "small_graph": "`relu(x + y) * 2` on 16 floats, backend eager, a call",
    "decoder_guards": "guards of a 28-layer decoder, one check",
    "shape_guards": "guards of two tensors with dynamic dimensions, one check",
}


def call_table(results: dict[str, Result]) -> list[str]:
    lines = [
        "| | stock | Trident | stock / Trident |",
        "|---|---|---|---|",
    ]
    for key, label in CALLS.items():
        if key in results:
            result = results[key]
            stock, ours = timing("stock")(result), timing("Trident")(result)
            lines.append(f"| {label} | {stock} | {ours} | {ratio(result)} |")
    return lines


PROGRAMS = {
    "host_small_graph": "`relu(x + y) * 2` on 16 floats",
    "host_mlp": "8 × (Linear(16, 16), ReLU), one row",
    "host_decoder": "28-layer decoder of width 32, one step",
    "host_training": "2-layer MLP, forward and backward",
}


def table(title: str, columns: str, rows: list[list[str]]) -> list[str]:
    """A Markdown table, nothing without rows; `columns` are separated by bars."""
    head = f"| {columns} |"
    rule = "|" + "---|" * (columns.count("|") + 1)
    lines = [title, "", head, rule, *(f"| {' | '.join(row)} |" for row in rows)]
    return lines if rows else []


def program_table(results: dict[str, Result]) -> list[str]:
    rows = []
    for name, label in PROGRAMS.items():
        for device, text in (("cpu", label), ("cuda", "the same, on a GPU")):
            if (result := results.get(f"{name}[{device}]")) is not None:
                cells = [timing(variant)(result) for variant in ("eager", "stock", "Trident")]
                rows.append([text, *cells, ratio(result, "eager_"), ratio(result)])
    return table(
        '`backend="trident"`: the graph itself runs natively.',
        "a call | eager | stock, backend eager | Trident | eager / Trident | stock / Trident",
        rows,
    )


INDUCTOR = {
    "inductor_small_graph": "`relu(x + y) * 2` on 16 floats",
    "inductor_mlp": "8 × (Linear(16, 16), ReLU), one row",
    "inductor_decoder": "28-layer decoder of width 32, one step",
}


def inductor_table(results: dict[str, Result]) -> list[str]:
    rows = []
    for name, label in INDUCTOR.items():
        if (result := results.get(name)) is not None:
            cells = [timing(variant)(result) for variant in ("eager", "stock", "Trident")]
            rows.append([label, *cells, ratio(result, "eager_"), ratio(result)])
    return table(
        "The default backend: Inductor's kernels, called by a native host program.",
        "a call | eager | stock | Trident | eager / Trident | stock / Trident",
        rows,
    )


TRITON = {
    "triton_one_kernel": "one kernel and its allocation",
    "triton_three_kernels": "three kernels and two operators",
    "triton_many_arguments": "a kernel with 30 arguments",
    "triton_autotuned": "an autotuned kernel",
    "triton_dynamic_grid": "a kernel with a symbolic grid",
    "triton_liger_layer": "Liger's RMSNorm, RoPE and SwiGLU of one layer",
    "triton_inductor_small_graph": "`relu(x + y) * 2` (Inductor)",
    "triton_inductor_mlp": "8 × (Linear(64, 64), ReLU) (Inductor)",
}


def triton_table(results: dict[str, Result]) -> list[str]:
    names = ("eager", "stock", "cpp_wrapper", "reduce-overhead", "Trident", "Trident backend")
    rows = []
    for name, label in TRITON.items():
        if (result := results.get(name)) is None:
            continue
        cells = [timing(n)(result) if n in result["timings"] else "–" for n in names]
        ratios = result["figures"]["ratios"]
        rows.append([label, *cells, *(f"{ratios[f'{n} / Trident']:.3g}x" for n in names[:2])])
    return table(
        "Triton's kernels on a GPU, user-written unless Inductor is named: host time. "
        '`torch.compile` as it is, with `cpp_wrapper` and `mode="reduce-overhead"`; Trident with '
        'the default backend and with `backend="trident"`.',
        "a call | eager | stock | cpp_wrapper | reduce-overhead | Trident | Trident's backend "
        "| eager / Trident | stock / Trident",
        rows,
    )


def triton_lines(results: dict[str, Result]) -> list[str]:
    lines = []
    if (found := results.get("triton_one_kernel")) is not None:
        f = found["figures"]
        both = " and ".join(f"{value:.2f}" for value in f["floor_ratios"].values())
        lines.append(
            f"- A C loop takes {nanoseconds(f['launch_ns'])} for that launch and "
            f"{nanoseconds(f['allocation_ns'])} for that allocation; a call with its kernel takes "
            f"{both} times as long with the default and with Trident's backend (goal ≤ "
            f"{f['floor_target']})."
        )
    for name, what in (
        ("triton_qwen3_decode", "stock modules"),
        ("triton_qwen3_liger_decode", "Liger's RMSNorm, RoPE and SwiGLU"),
        (
            "triton_qwen3_liger_decode_all_specialized",
            "the same, under a recompile limit of 64 (a frame needs 28 specializations)",
        ),
    ):
        if (found := results.get(name)) is not None:
            f = found["figures"]
            took = ", ".join(f"{variant} {ms:.1f} ms" for variant, ms in f["ms"].items())
            goal = f" (goal ≤ {f['target_ms']} ms)" if "target_ms" in f else ""
            lines.append(
                "- A decode step of a Qwen3-0.6B-shaped model (random weights, bf16, static "
                f"cache) with {what}: {took}{goal}."
            )
    return lines


def inductor_lines(results: dict[str, Result]) -> list[str]:
    lines = []
    found = results.get("inductor_small_graph")
    if found is not None and "loop_ratio" in found["figures"]:
        f = found["figures"]
        lines.append(
            f"- With Inductor `relu(x + y) * 2` takes {f['loop_ratio']:.2f} of the time of a C++ "
            "function that Python calls, which allocates and calls the same kernel (goal ≤ "
            f"{f['loop_target']})."
        )
    for cache in ("cold", "warm"):
        if (found := results.get(f"inductor_compile_time[{cache}]")) is not None:
            f = found["figures"]
            lines.append(
                f"- Compiling with Inductor and calling twice, caches {cache}: "
                f"{f['trident_s']:.2f} s, stock {f['stock_s']:.2f} s: {f['ratio']:.2f} of stock's "
                f"time (goal ≤ {f['target']})."
            )
    for name, what in (
        ("small", "the small graph"),
        ("narrow_decoder", "a step of the 28-layer decoder of width 32"),
        ("decoder", "the same at width 128"),
    ):
        if (found := results.get(f"profile_{name}")) is not None:
            shares = found["figures"]["percent"]
            parts = sorted(shares.items(), key=lambda item: -item[1])
            text = ", ".join(f"{part} {share:.0f}%" for part, share in parts if share >= 0.5)
            took = nanoseconds(found["figures"]["us_per_call"] * 1e3)
            lines.append(f"- Where the {took} of {what} with Inductor go (perf): {text}.")
    return lines


CHAINED = {
    "add": "`x + y`",
    "mul": "`x * y`",
    "add_relu_mul": "`relu(x + y) * y`",
    "view": "`x.view(4, 4).view(16)`",
    "slice": "`x[1:]`",
}


def chain_table(results: dict[str, Result]) -> list[str]:
    rows = []
    for name, label in CHAINED.items():
        if (result := results.get(f"host_operators[{name}]")) is not None:
            cells = [
                nanoseconds(
                    result["timings"][variant]["median_ns"] / result["figures"]["operators"]
                )
                for variant in ("eager", "stock", "Trident", "C++")
            ]
            loop = ratio(result, "loop_").replace("≥", "≤")
            rows.append([label, *cells, ratio(result, "eager_"), loop])
    return table(
        "One operator of a chain of 100, on 16 floats; a loop in C++ makes the same calls.",
        "an operator of | eager | stock | Trident | C++ | eager / Trident | Trident / C++",
        rows,
    )


def guard_lines(results: dict[str, Result]) -> list[str]:
    lines = []
    if (found := results.get("two_tensors")) is not None:
        f = found["figures"]
        lines.append(
            f"- The guards of a function of two tensors take {f['guards_ns']:.0f} ns (goal ≤ "
            f"{f['target_ns']}), and GLOBAL_STATE {f['global_state_ns']:.0f} ns; Dynamo's check of "
            f"both takes {f['ratio']:.3g} times as long as ours, each called from Python."
        )
    for name, what in (
        ("many_sizes", "that differ in a size"),
        ("many_modules", "that differ in an attribute of `self`"),
    ):
        if (found := results.get(name)) is not None:
            a_call = found["figures"]["a_call_ns"]
            ours = ", ".join(f"{n}: {nanoseconds(a_call[f'Trident, {n}'])}" for n in (1, 8, 64))
            stock = ", ".join(f"{n}: {nanoseconds(a_call[f'stock, {n}'])}" for n in (1, 8, 64))
            lines.append(f"- A call by number of specializations {what}: {ours}; stock {stock}.")
    for backend in ("eager", "trident"):
        if (found := results.get(f"graph_breaks[{backend}]")) is not None:
            ours, stock = timing("Trident")(found), timing("stock")(found)
            lines.append(
                f"- A function in three pieces, backend {backend}: {ours}, stock (backend eager) "
                f"{stock}: {ratio(found)}."
            )
    if (found := results.get("guard_build")) is not None:
        f = found["figures"]
        lines.append(
            f"- Building guards takes {f['build_us_per_leaf']:.0f} µs a leaf "
            f"({f['leaves']} leaves); a specialization's {f['rows']} rows take "
            f"{f['row_bytes'] / 1024:.0f} KiB, what is remembered of a run "
            f"{f['memo_bytes'] / 1024:.0f} KiB."
        )
    if (found := results.get("instructions")) is not None:
        f = found["figures"]
        lines.append(
            "- Instructions of a check (callgrind): two tensors "
            f"{f['two_tensors_instructions']:,.0f}, the 28-layer decoder "
            f"{f['decoder_instructions']:,.0f}."
        )
    return lines


def other_lines(results: dict[str, Result]) -> list[str]:
    lines = [*triton_lines(results), *guard_lines(results), *inductor_lines(results)]
    if (found := results.get("build_time")) is not None:
        f = found["figures"]
        lines.append(
            f"- Building an SCM: {f['fixed_ms']:.1f} ms fixed, a native frame plan included (goal "
            f"≤ {f['target']} ms); small specializations: the 2nd {f['second_ms']:.2f} ms, the "
            f"20th {f['twentieth_ms']:.2f} ms."
        )
    if (found := results.get("decoder_guards")) is not None:
        f = found["figures"]
        lines.append(
            f"- The 28-layer decoder has {f['checks']} checks ({f['rows']} rows with the fetches); "
            f"building them took {f['build_ms']:.0f} ms."
        )
    if (found := results.get("python_tax")) is not None:
        ratios = found["figures"]["ratios"].values()
        lines.append(
            f"- Pure-Python programs while enabled: {min(ratios):.2f} to {max(ratios):.2f} times "
            "their time while disabled (goal: no difference)."
        )
    if (found := results.get("python_tax_after_disable")) is not None:
        ratios = found["figures"]["ratios"].values()
        lines.append(
            f"- The same after the last disable, in processes of their own: {min(ratios):.2f} to "
            f"{max(ratios):.2f} times the time of a process without Trident."
        )
    if (found := results.get("recursion_depth")) is not None:
        f = found["figures"]
        lines.append(
            f"- Depth of recursion under a limit of 5000: {f['before']} before, {f['enabled']} "
            f"while enabled, {f['after']} after."
        )
    if (found := results.get("host_build")) is not None:
        f = found["figures"]
        each = ", ".join(
            f"{int(n):,}: {f['traced_s'][n]:.2f} + {f['built_s'][n]:.2f} s" for n in f["built_s"]
        )
        lines.append(f"- Tracing + building a host program, by operators: {each}.")
    if (found := results.get("host_small_loop")) is not None:
        f = found["figures"]
        lines.append(
            f"- `relu(x + y) * 2` takes {f['ratio']:.2f} of the time of a C++ function that Python "
            f"calls (goal ≤ {f['target']})."
        )
    if (found := results.get("host_chain_loop")) is not None:
        n = found["figures"]["operators"]
        ours, loop = (found["timings"][name]["median_ns"] / n for name in ("Trident", "C++"))
        lines.append(
            f"- An operator in a chain of {n:,} takes {ours:.0f} ns, in a C++ loop {loop:.0f} ns."
        )
    if (found := results.get("host_decoder[cpu]")) is not None:
        f = found["figures"]
        lines.append(
            f"- The decoder step has {f['operators']:,} operators. Stock compiles it in "
            f"{f['stock_compile_s']:.1f} s (backend eager); tracing it takes {f['trace_s']:.1f} s "
            f"more and building its SCM {f['build_s']:.1f} s "
            f"({f['build_s'] / f['stock_compile_s']:.0%} of stock's time, goal ≤ 25%)."
        )
    if (found := results.get("enable_disable")) is not None:
        lines.append(f"- `enable()` and `disable()`: {found['figures']['toggle_us']:.0f} µs.")
    return lines


def environments(results: dict[str, Result]) -> list[str]:
    """The distinct environments of the results shown, one line each."""
    seen = []
    for result in results.values():
        e = result["environment"]
        commit = (e["commit"] or "none")[:10] + (" with local changes" if e["dirty"] else "")
        gpu = f" with an {e['gpu']}" if e.get("gpu") else ""
        line = (
            f"Measured on {e['cpu']}{gpu}, {e['cores']} cores, Python {e['python']}, "
            f"torch {e['packages']['torch']}, commit {commit}."
        )
        if line not in seen:
            seen.append(line)
    return seen


def render(results: dict[str, Result]) -> str:
    if not results:
        return "Nothing recorded yet: run `make bench`."
    note = "Medians ± half the interquartile range; ratios are medians of interleaved rounds."
    parts = [
        call_table(results),
        inductor_table(results),
        triton_table(results),
        program_table(results),
        chain_table(results),
        other_lines(results),
        [note, *environments(results)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def main() -> None:
    paths = [
        RESULTS / f"{name}.json"
        for name in ("dispatch", "guards", "inductor", "triton", "profile", "host")
    ]
    results: dict[str, Result] = {}
    for path in paths:
        results.update(json.loads(path.read_text()) if path.exists() else {})
    text = README.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        sys.exit(f"{README} lacks the markers {BEGIN!r} and {END!r}: put them where the table goes")
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    README.write_text(f"{before}{BEGIN}\n{render(results)}\n{END}{after}", encoding="utf-8")
    print(f"{README.name}: {len(results)} results of {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
