"""python3 -m unittest discover benches/peers: what can be tested without a card; with PyTorch also every operator's peers."""

import contextlib
import importlib.util
import io
import json
import tempfile
import unittest
from pathlib import Path

import peers

HAS_TORCH = importlib.util.find_spec("torch") is not None


def case(op, label="anchor", **shape):
    return {
        "kind": "case", "name": f"{op} {label}", "op": op, "model": None, "phase": None, "dtype": "bf16",
        "shape": shape, "bytes": 1 << 16, "flops": 1 << 20,
    }  # fmt: skip


CASES = [
    case("glu", "qwen3-4b decode 1", rows=4, cols=64, activation="silu"),
    case("matmul", m=4, n=8, k=16),
    case("rope", tokens=4, heads=2, head_dim=16, rotary_dim=8, style="interleaved"),
    case("unheard_of", size=4),
]


def run(*arguments, cases=CASES):
    """Exit status, results and what was printed."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        file, results = Path(folder, "cases.jsonl"), Path(folder, "peers.jsonl")
        file.write_text("".join(json.dumps(line) + "\n" for line in cases))
        status = peers.main(["--cases", str(file), "--json", str(results), *arguments])
        return status, [json.loads(line) for line in results.read_text().splitlines()], out.getvalue()


class Peers(unittest.TestCase):
    def test_anchors_come_first(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "cases.jsonl")
            file.write_text("".join(json.dumps(line) + "\n" for line in CASES))
            names = [line["name"] for line in peers.read_cases(file, [])]
            self.assertEqual(names[-1], "glu qwen3-4b decode 1")
            self.assertEqual(
                [line["op"] for line in peers.read_cases(file, ["rope", "glu"])], ["rope", "glu"]
            )

    def test_a_list_that_cannot_be_read_is_an_error(self):
        with contextlib.redirect_stderr(io.StringIO()) as text:
            self.assertEqual(peers.main(["--cases", "/no/such/file"]), 2)
        self.assertIn("/no/such/file", text.getvalue())
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(peers.main(["--cases", __file__]), 2)

    def test_a_missing_device_is_no_error(self):
        status, lines, out = run("--device", "cuda:77")
        self.assertEqual(status, 0)
        self.assertEqual(lines[0]["kind"], "run")
        self.assertIn("missing", lines[0])
        self.assertIn("no peers:", out)

    @unittest.skipUnless(HAS_TORCH, "PyTorch is not installed")
    def test_what_is_there_is_timed_and_the_rest_reported(self):
        status, lines, _ = run("--device", "cpu", "--no-compile")
        self.assertEqual(status, 0)
        timed = {line["name"]: line for line in lines if line["kind"] == "peer"}
        self.assertEqual(set(timed), {line["name"] for line in CASES[:3]})
        self.assertTrue(all(line["us"] > 0 for line in timed.values()))
        missing = [line for line in lines if line["kind"] == "missing"]
        self.assertEqual([line["name"] for line in missing], ["unheard_of anchor"])

    @unittest.skipUnless(HAS_TORCH, "PyTorch is not installed")
    def test_a_wrong_result_is_not_timed(self):
        import operators

        original = operators.OPERATORS["matmul"]

        def wrong(*arguments):
            operator = original(*arguments)
            operator.peers = [operators.Peer("wrong", lambda x, w: x @ w.T * 1.1)]
            return operator

        operators.OPERATORS["matmul"] = wrong
        try:
            _, lines, _ = run("--device", "cpu", "matmul")
        finally:
            operators.OPERATORS["matmul"] = original
        self.assertEqual([line["kind"] for line in lines], ["run", "missing"])
        self.assertIn("wrong result: relative L2 error", lines[1]["reason"])


if __name__ == "__main__":
    unittest.main()
