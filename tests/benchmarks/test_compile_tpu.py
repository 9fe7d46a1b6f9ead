"""Programs compiled for TPUs: their collectives, their memory, what does not fit."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "compile_tpu.py"

ROUND = """\
HloModule jit_rounds, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %a)
}

%fused (p: f32[4]) -> f32[8] {
  %p = f32[4]{0:T(128)} parameter(0)
  ROOT %all-gather.1 = f32[8]{0:T(128)} all-gather(%p), dimensions={0}, channel_id=3
}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0:T(128)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = f32[4]{0} get-tuple-element(%state), index=1
  %fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %scatter = f32[1]{0} reduce-scatter(%x), dimensions={0}, to_apply=%add
  ROOT %next = (s32[], f32[4]{0}) tuple(%i, %x)
}

%condition (state: (s32[], f32[4])) -> pred[] {
  %state = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] custom-call(%state), custom_call_target="Less"
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="jit(rounds)/all-reduce(x)"}
  %made = u32[4,1]{0,1:T(1,128)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %psum.54 = s32[]{:T(128)} all-reduce(%x), channel_id=1, to_apply=%add
  %all-reduce.10 = (f32[]{:T(128)}, f32[200]{0:T(1024)S(1)}, bf16[2,5]{1,0:T(8,128)\
(2,1)}, f32[], f32[], /*index=5*/pred[16]{0:T(512)(128)(4,1)}) all-reduce(%x, %x, %x, \
%x, %x, /*index=5*/%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %part = f32[200]{0} get-tuple-element(%all-reduce.10), index=1
  %rows = f32[2,2]{1,0} constant({
    { 1, 2 },
    { 3, 4 } })
  %while.1 = (s32[], f32[4]{0}) while(%x), condition=%condition, body=%body
  ROOT %end = f32[4]{0} get-tuple-element(%while.1), index=1
}
"""

BESIDE_OTHER_WORK = """\
%wrapped (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %to-all = f32[8]{0} all-to-all(%p), dimensions={0}
}

ENTRY main {
  %x = f32[4]{0} parameter(0)
  %ar = (f32[4]{0}, f32[6]{0}) all-reduce-start(%x, %x), to_apply=%add
  %ard = (f32[4]{0}, f32[6]{0}) all-reduce-done(%ar)
  %ag = ((f32[4]{0}, f32[2,3]{1,0}), (f32[16]{0}, f32[8,3]{1,0})) all-gather-start(%x)
  %agd = (f32[16]{0}, f32[8,3]{1,0}) all-gather-done(%ag)
  %cp = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x)
  %cpd = f32[4]{0} collective-permute-done(%cp)
  %aa = ((f32[8]{0}), f32[8]{0}, s32[]) async-start(%x), calls=%wrapped
  %aad = f32[8]{0} async-done(%aa)
  ROOT %again = ((f32[8]{0}), f32[8]{0}) all-to-all-start(%x), calls=%wrapped
}
"""


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.fixture(scope="module")
def hlo(benchmarks_on_the_path):
    return importlib.import_module("hlo")


@pytest.fixture(scope="module")
def programs(benchmarks_on_the_path):
    return importlib.import_module("tpu_programs")


def test_collectives_are_found_with_their_bytes_and_in_loops(hlo):
    assert hlo.collectives(ROUND) == [
        ("all-gather", 32, True),  # in a fusion that the loop's body calls
        ("reduce-scatter", 4, True),
        ("all-reduce", 4, False),
        ("all-reduce", 4 + 800 + 20 + 4 + 4 + 16, False),
    ]


def test_a_collective_beside_other_work_counts_once(hlo):
    assert hlo.collectives(BESIDE_OTHER_WORK) == [
        ("all-to-all", 32, False),
        ("all-reduce", 16 + 24, False),
        ("all-gather", 64 + 96, False),
        ("collective-permute", 16, False),
    ]


def test_custom_calls_are_counted_by_target(hlo):
    assert hlo.custom_calls(ROUND) == {"AllocateBuffer": 1, "Less": 1}


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[]{:T(128)}", 4),
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}", 12),
        ("(pred[5]{0}, (s4[3]{0:T(128)(8,1)E(4)}, f8e4m3fn[7]), token[])", 5 + 2 + 7),
        ("c64[2,<=3]{1,0}", 48),
        ("f32[0,4]{1,0}", 0),
    ],
)
def test_a_shape_says_its_bytes(hlo, shape, size):
    assert hlo.shape_bytes(shape) == size


def test_an_unknown_topology_names_those_known(programs):
    with pytest.raises(ValueError, match="topology='v5e:3x3' .* v5e:2x2, v5e:2x4"):
        programs.check_topology("v5e:3x3")
    for kind, of in programs.GENERATIONS.items():
        assert [programs.chips(f"{kind}:{layout}") for layout in of.layouts] == (
            [1, 4, 8, 256]
        )


def test_a_missing_compiler_is_told_with_what_installs_it(programs, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"libtpu: pip install 'fedvi\[tpu-compile\]'"):
        programs.check_compiler()


@pytest.mark.parametrize(
    "cohort, chips, chunk, expected",
    [(16, 4, 0, 4), (100, 4, 20, 13), (3, 256, 0, 1), (5, 1, 2, 2), (5, 1, 9, 5)],
)
def test_clients_at_once_are_the_federations(programs, cohort, chips, chunk, expected):
    assert programs.together(cohort, chips, chunk) == expected


def row_of(**more):
    settings = {"program": "rounds", "topology": "v5e:2x2", "algorithm": "fedavg"}
    settings |= {"model": "mlp", "dtype": "float32", "clients": 16}
    one = {"kind": "all-reduce", "bytes": 4000, "in_loop": False, "count": 1}
    row = {"settings": settings, "outcome": "compiled", "host": False, "cohort": 16}
    row |= {"sums_only": True, "together": 4, "memory_bytes": 2**34, "programs": 1}
    row |= {"argument_bytes": 2**20, "temporary_bytes": 2**20, "problem": None}
    row |= {"compile_seconds": 30.0, "compile_cpu_seconds": 7.0, "custom_calls": {}}
    row |= {"flops_per_image": 109.0, "hand_flops_per_image": 100.0}
    row |= {"bytes_per_image": None, "hand_bytes_per_image": 5.0, "largest_cohort": 9}
    return row | {"collectives": [one]} | more


@pytest.mark.parametrize(
    "found, fits",
    [
        ("about chunk_size=4 would fit", "21.00G"),
        # In proportion 11: what was too many is not proposed again.
        ("about chunk_size=9 would fit", "9.00G"),
        ("not one client fits", "126.45G"),
    ],
)
@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the "
        "total memory required for HLO temporaries (USED) exceeds available HBM "
        "(11264.0M). HLO module: jit_pure_rounds.\nSee elsewhere.",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used USED of "
        "11.00G hbm. Exceeded hbm capacity by much.",
    ],
)
def test_what_does_not_fit_says_which_chunk_would(programs, found, fits, message):
    row = row_of(together=10, argument_bytes=2**30)
    told = programs.failure(message.replace("USED", fits), row)
    assert told["outcome"] == "does not fit"
    needs = f"chunk_size=10 needs {float(fits[:-1]):.2f} GiB .* 1.00 GiB .* 11.00 GiB"
    assert re.search(f"{needs}: {found}", told["problem"])


def test_arguments_that_are_too_large_are_no_matter_of_chunks(programs):
    told = programs.failure(
        "RESOURCE_EXHAUSTED: Used 40.00G of 16.00G hbm", row_of(argument_bytes=2**35)
    )
    assert told["problem"].endswith(
        "of 16.00 GiB: take fewer clients, or fewer images of each"
    )


def test_other_failures_are_told_in_one_line(programs):
    told = programs.failure("UNIMPLEMENTED: no callbacks\nmore", row_of(host=True))
    assert told["outcome"] == "does not compile"
    assert told["problem"] == (
        "it calls Python between rounds: UNIMPLEMENTED: no callbacks"
    )


def test_the_largest_cohort_fills_the_memory(programs):
    # 100 fixed, and of each of ten clients 20 as they lie and 10 beside.
    cohort = programs.largest_cohort(1000, 300, 200, 100.0, 10)
    assert cohort == 30
    assert 100 + cohort * (20 + 10) == 1000


def test_one_all_reduce_is_asked_of_rounds_that_only_sum(programs):
    promise = programs.one_all_reduce
    row = row_of()
    [one] = row["collectives"]
    assert promise(row) is True
    assert promise(row_of(collectives=[one | {"count": 2}])) is False
    # XLA does not join what is as large.
    large = one | {"count": 2, "bytes": 80_000_000}
    assert promise(row_of(collectives=[large])) is True
    assert promise(row_of(collectives=[one, one | {"kind": "all-gather"}])) is False
    assert promise(row_of(collectives=[])) is False
    assert promise(row_of(sums_only=False)) is None
    assert promise(row_of(outcome="does not fit")) is None
    for key, value in (("program", "evaluate"), ("topology", "v5e:1x1")):
        assert promise(row_of(settings=row["settings"] | {key: value})) is None


def in_a_process(code, *words):
    # Its flags are those of other scripts too.
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
    )


def test_rows_that_are_known_are_not_compiled_again():
    other = {"flops_per_image": 111.0, "bytes_per_image": 7.0, "problem": "too large"}
    rows = [row_of(), row_of(host=True, **other)]
    rows[1]["settings"]["algorithm"] = "cfl"
    code = """
import json, sys
import compile_tpu
known, new = json.loads(sys.argv[1])
asked = []
def compile_one(settings):
    asked.append(settings["algorithm"])
    return {key: value for key, value in new.items() if key != "settings"}
found = compile_tpu.rows_of(
    [known["settings"], new["settings"]], [known], print, compile_one
)
assert asked == ["cfl"], asked
assert found == [known, new]
broken = dict(known, collectives=2 * known["collectives"])
assert compile_tpu.broken(found) is None
assert "more with fedavg" in compile_tpu.broken([broken, new])
"""
    process = in_a_process(code, json.dumps(rows))
    assert process.returncode == 0, process.stderr
    first, kept, second = process.stdout.splitlines()[1:]
    table = [[cell.strip() for cell in line.split("|")] for line in (first, second)]
    assert table[0][6:10] == ["30 (7)", "yes", "0.000109 / 0.0001", "yes"]
    assert table[0][10:12] == ["- / 5e-06", "0"]
    assert table[1][7] == "no, calls Python"
    assert table[1][9:11] == ["no", "(7e-06) / 5e-06"]
    assert [cells[12] for cells in table] == ["1.0 of 16 (0.0%)", "too large"]
    assert table[0][15:17] == ["ok", "all-reduce 4,000 B"]
    assert "'algorithm': 'cfl'" in kept  # all rows, after each new one


@pytest.mark.long
@pytest.mark.parametrize(
    "flag, told",
    [
        ("--topology=v9:2x2", "error: topology='v9:2x2' is not known: choose from"),
        ("--participants=20", "error: participants=20 is more than clients=16"),
        ("--algorithm=fedavgg", "error: algorithm='fedavgg' must be one of"),
        ("--image_shape=28,x", "must look like 32,32,3"),
        ("--out=/dev/null/rows", "error: out='/dev/null/rows' cannot be written"),
    ],
)
def test_a_mistake_is_told_before_anything_is_compiled(flag, told):
    process = subprocess.run(
        [sys.executable, str(SCRIPT), flag], capture_output=True, text=True
    )
    assert process.returncode != 0
    assert told in process.stdout + process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs fedvi[tpu-compile]"
)
def test_a_round_compiles_for_chips_that_are_not_there(tmp_path):
    out = tmp_path / "results" / "tiny"
    sizes = ["--image_shape=2,2,1", "--hidden=3", "--examples=4", "--batch_size=2"]
    sizes += ["--clients=8", "--test_examples=2"]
    process = subprocess.run(
        [sys.executable, str(SCRIPT), *sizes, f"--out={out}"],
        capture_output=True,
        text=True,
    )
    report = json.loads(out.with_suffix(".json").read_text())
    [row] = report["rows"]
    assert row["outcome"] == "compiled", row
    assert (row["together"], row["programs"]) == (2, 1)
    assert row["problem"] is None and row["largest_cohort"] > 8
    # The sums of 5 x 3 and 4 x 10 weights, of the client's weight and of its loss.
    sizes = [c["bytes"] for c in row["collectives"] if c["kind"] == "all-reduce"]
    assert max(sizes) >= 4 * (5 * 3 + 4 * 10 + 2)
    page = out.with_suffix(".md").read_text()
    assert page in process.stdout and "Compiled, not run" in page
    assert (process.returncode == 0) == ("| ok |" in page)
