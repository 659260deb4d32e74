"""`python3 -m unittest bench.test_report`: needs no package. Reads every file of the benchmark, and makes a page of a small record."""

import ast
import unittest
from dataclasses import replace
from pathlib import Path

from . import configs, report

# What goes with a size of the models that grow.
ALONG = {"hidden": {"heads": 0, "kv_heads": 0, "ffn": 0}, "seq": {"batch": 0}}


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
    many = session(**{"mcc": 1.0, "1 rank": 1.0, "tp 4": 0.5, "pp 2": 0.8})
    # Twice the layers take three times as long, and four times as many four times as long as these.
    grown = {f"{n} layers": {"flops": 1e9 * n, "at": {"layers": n}, "losses": {}, "sessions": [session(mcc=s, torch=1.0 * n)],
                             "compile": {"cold_s": 1.0, "warm_s": 0.1 * n, "kernels": 60, "plan_bytes": 2**29}}
             for n, s in ((2, 0.1), (4, 0.3), (16, 1.2))}
    # One is on two lines, and one was measured before there were any.
    compiled = {name: {"cold_s": 2.0, "warm_s": s, "kernels": 60, "plan_bytes": 2**30 / s} | ({"at": at} if at else {})
                for name, s, at in (("large, tp 4", 4.0, {"tp": 4}), ("large, 1 rank", 1.0, {"tp": 1, "dp": 1}), ("deep", 9.0, None))}
    return {"machine": {"cpu": "a CPU", "cores": 2, "caches": {"L1": "32K"}, "memory_gib": 8}, "versions": {"torch": "1.0", "jax": None},
            "models": {"gpt-nano": model}, "growth": grown, "compile": compiled, "ranks": {"llama-mini": {"sessions": meshes}, "small": {"sessions": [many]}}}


class Report(unittest.TestCase):
    def test_ratios_are_within_sessions(self):
        self.assertEqual(report.against(small()["models"]["gpt-nano"]), {"torch": 1.5})

    def test_a_page_has_times_shares_ratios_and_reasons(self):
        page = report.page(small())
        self.assertIn("| gpt-nano | 1500 | 100 | 50 % | 2250 | 1.50 | yes, 3e-06 |", page)
        self.assertIn("mcc: abc.", page)
        self.assertIn("| model | compile: mcc | first step: mcc | first step: torch |", page)
        self.assertIn("| gpt-nano | 1.00, 0.20 | 2.00, 9.00 | 6.00, 9.00 |", page)
        self.assertIn("- gpt-nano, jax: no such module", page)
        self.assertIn("0.90 of one rank", page)

    def test_revisions_that_differ_are_told_by_part_and_by_model(self):
        record = small()
        record["models"]["gpt-small"] = record["models"]["gpt-nano"] | {"revision": "xyz"}
        page = report.page(record)
        self.assertIn("mcc: abc (models), xyz (models).", page)
        self.assertIn("| gpt-small | 1500 | 100 | 50 % | 2250 | 1.50 | yes, 3e-06 | xyz |", page)

    def test_a_kernel_has_a_row_for_each_number_of_threads(self):
        def rates(top, mcc):
            return {"peak_gflops": top, "gflops": {f"gemm 8x8x8 {layout}": {"mcc": mcc, "torch": 40.0} for layout in ("NN 0", "TN 1")}
                    | {"attention forward 1x2x8x4": {"mcc": mcc}}}

        page = report.kernels({"gemm 8x8x8 NN 0": {"1": rates(100.0, 60.0), "2": rates(200.0, 80.0)}})
        self.assertIn("| gemm | threads | NN | TN added |", page)
        self.assertIn("| 8x8x8 | 1 | 60, 1.50 | 60, 1.50 |", page)
        self.assertIn("| 8x8x8 | 2 | 40, 2.00 | 40, 2.00 |", page)
        self.assertIn("| 1x2x8x4 | 1 | 60 |", page)

    def test_a_pipeline_is_compared_beside_its_bubble(self):
        self.assertAlmostEqual(report.efficiency(small()["ranks"]["llama-mini"])["pp2, mb8"][0], 1.0)

    def test_growth_is_a_power_of_a_size(self):
        self.assertAlmostEqual(report.power([(x, 3 * x**1.5) for x in (7, 1, 4)]), 1.5)
        self.assertIsNone(report.power([(4, 1.0), (4, 2.0)]))
        page = report.page(small())
        self.assertIn("| grows | layers 4 to 16: mcc | layers 4 to 16: torch |", page)
        self.assertIn("| step | 1.00 | 1.00 |", page)
        self.assertIn("| compile, cold | 0.00 |  |", page)

    def test_compiles_are_on_lines_in_order_of_size(self):
        lines = report.lines(small()["compile"])
        self.assertEqual({size: [at for at, _ in points] for size, points in lines.items()}, {"tp": [1, 4], "dp": [1]})
        page = report.page(small())
        self.assertIn("| grows | tp 1 to 4: mcc |", page)
        self.assertIn("| warm | 1.00 |", page)
        self.assertIn("| plan of a rank | -1.00 |", page)
        self.assertIn("| deep | 2.00 | 9.00 | 60 |", page)
        self.assertNotIn("| dp ", page)
        record = small()
        record["compile"] = {"deep": record["compile"]["deep"]}
        self.assertNotIn("compile.svg", report.page(record))

    def test_more_ranks_are_compared_with_one(self):
        self.assertEqual(report.efficiency(small()["ranks"]["small"]), {"tp 4": (0.5, "its ranks"), "pp 2": (0.625, "its ranks")})

    def test_points_of_growth_differ_in_one_size(self):
        for quick in (False, True):
            models = {model.name: model for model in configs.growth(quick)}
            self.assertIn(configs.base(quick), models.values())
            self.assertEqual(len(models), len(configs.growth(quick)))
            for size, points in report.lines({m.name: {"at": at, "model": m} for m, at in configs.growth(quick).items()}).items():
                others = {replace(p["model"], name="", **{size: 0}, **ALONG.get(size, {})) for _, p in points}
                self.assertEqual(len(others), 1, size)
                if size == "seq":
                    self.assertEqual(len({p["model"].tokens for _, p in points}), 1)
            self.assertEqual(max(at.get("tp", 0) for _, _, at in configs.compiled(quick).values()), 4 if quick else 64)

    def test_ranks_are_as_many_as_there_are_cores_and_divide_the_model(self):
        names = [list(configs.counts(configs.base(False), cores)[0]) for cores in (1, 2, 4)]
        self.assertEqual(names[:2], [["1 rank"], ["1 rank", "dp 2", "tp 2", "pp 2"]])
        self.assertEqual(names[2][4:], ["dp 4", "pp 4"])

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
