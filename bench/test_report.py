"""`python3 -m unittest bench.test_report`: needs no package. Reads every file of the benchmark, and makes a page of a small record."""

import ast
import unittest
from pathlib import Path

from . import configs, report


def session(**steps):
    own = {name: {"step_s": s, "peak_bytes": 2**30, "latency_s": 9.0, "first_step_s": 2 * s} for name, s in steps.items()}
    own["mcc"] |= {"plan_bytes": 2**29, "compile_s": 0.2, "kernels": 60}
    return {"contestants": own, "peak_gflops": {"1": 100.0, "2": 200.0}}


def small():
    cold = {"mcc": {"cold_compile_s": 1.0, "kernels": 60, "cold_latency_s": 2.0, "cold_first_step_s": 1.0},
            "torch": {"cold_latency_s": 6.0, "cold_first_step_s": 3.0}, "jax": {"failed": "no such\nmodule"}}
    config = configs.MODELS[0]
    # The peer's first session met another machine's load: ratios are of one session each.
    sessions = [session(mcc=1.0, torch=1.5), session(mcc=2.0, torch=3.0)]
    model = {"config": config.describe(), "flops": 15e10, "contestants": cold, "sessions": sessions,
             "losses": {"torch": {"first": 1e-7, "later": 3e-6, "agree": True}}, "revision": "abc"}
    meshes = [session(**{"mcc": 1.0, "one rank": 0.9, "tp2": 1.0}), session(**{"mcc": 1.0, "one rank, mb8": 0.8, "pp2, mb8": 0.9})]
    return {"machine": {"cpu": "a CPU", "cores": 2, "caches": {"L1": "32K"}, "memory_gib": 8}, "versions": {"torch": "1.0", "jax": None},
            "models": {"gpt-nano": model}, "growth": {"layers-2": model | {"size": "layers"}}, "ranks": {"llama-mini": {"sessions": meshes}}}


class Report(unittest.TestCase):
    def test_ratios_are_within_sessions(self):
        self.assertEqual(report.against(small()["models"]["gpt-nano"]), {"torch": 1.5})

    def test_a_page_has_times_shares_ratios_and_reasons(self):
        page = report.page(small())
        self.assertIn("| gpt-nano | 1500 | 100 | 50 % | 2250 |  |  | 1.50 |  | yes, 3e-06 |", page)
        self.assertIn("- gpt-nano, jax: no such module", page)
        self.assertIn("0.90 of one rank", page)

    def test_a_pipeline_is_compared_beside_its_bubble(self):
        self.assertAlmostEqual(report.efficiency(small()["ranks"]["llama-mini"])["pp2, mb8"], 1.0)

    def test_operations_are_those_of_the_formula(self):
        nano = configs.MODELS[0]
        self.assertEqual(nano.flops(), (6 * (6 * 12 * 384 * 384 + 384 * 8192) + 12 * 6 * 384 * 256) * 2048)

    def test_every_file_parses(self):
        files = list(Path(__file__).parent.rglob("*.py"))
        self.assertGreater(len(files), 8)
        for file in files:
            ast.parse(file.read_text(), file)


if __name__ == "__main__":
    unittest.main()
