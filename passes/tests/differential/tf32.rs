//! `--tf32`: which products are marked, how that prints, and how far it moves results.

use crate::harness::{Ranges, Runner, compiled, without_marks};
use crate::models::{DEEPSEEK, GPT2, LLAMA, MIXTRAL, case};
use expect_test::expect;
use ir::graph::Body;
use ir::op::{DType, Op};
use ir::program::Space;
use ir::text::{parse_kernel, parse_local, print_kernel, print_local};

/// Whether each dot of a body is marked, and of what it is.
fn marks(body: &Body) -> Vec<(bool, DType, bool)> {
    let dtype = |v| body[body[v].args[0]].ty.dtype;
    let mark = |v| match body[v].op {
        Op::Dot { tf32, .. } => Some((tf32, dtype(v), body.is_matrix_product(v))),
        Op::GroupedDot { tf32, .. } => Some((tf32, dtype(v), true)),
        _ => None,
    };
    body.values().filter_map(mark).collect()
}

#[test]
fn products_of_f32_are_marked_in_what_ranks_run() {
    for (model, words) in [
        (GPT2, "tf32 tp2 pp2 m2"),
        (GPT2, "tf32 offload dp2 zero1 m2"),
        (LLAMA, "tf32 tp2 sp chunks2 cp2 m2"),
        (MIXTRAL, "tf32 dp2 ep2 m1"),
        (DEEPSEEK, "bf16 tf32 m1"),
    ] {
        let c = compiled(model.0, model.1, &case(words));
        let before = [&c.graph.body, &c.sharded.graph.body].into_iter().chain(c.stages.iter().map(|l| &l.body));
        assert!(before.flat_map(marks).all(|(marked, ..)| !marked), "{words}");
        let locals = c.locals.iter().chain(&c.evaluation.locals);
        let ran: Vec<_> = locals.map(|l| &l.body).chain(c.job.kernels.iter().map(|k| &k.body)).flat_map(marks).collect();
        for (marked, dtype, is_product) in &ran {
            assert_eq!(*marked, *dtype == DType::F32 && *is_product, "{words}");
        }
        assert_eq!(ran.iter().any(|(marked, ..)| *marked), !words.contains("bf16"), "{words}");
        // Graphs and kernels read back with their marks.
        for local in &c.locals {
            assert_eq!(parse_local(&print_local(local)).as_ref(), Ok(local), "{words}");
        }
        for kernel in &c.job.kernels {
            let (text, mut plain) = (print_kernel(kernel), kernel.clone());
            assert_eq!(parse_kernel(&text).as_ref(), Ok(kernel), "{text}");
            without_marks(&mut plain.body);
            assert_eq!(plain.name() == kernel.name(), plain == *kernel, "{text}");
            assert!(kernel.on == Space::Device || plain == *kernel, "a product on the host: {text}");
        }
    }
}

#[test]
fn a_marked_product() {
    let text = "
model one(batch, hidden = 4, out = 3) {
  input x: f32[batch, hidden];
  let y = linear(x, hidden, out);
  loss mean(y * y);
}
train { optimizer: sgd(momentum: 0.0); clip: 0.0; }";
    let c = compiled(text, &[], &case("tf32 b2"));
    let dots: String = print_local(&c.locals[0]).lines().filter(|l| l.contains("dot ")).map(|l| format!("{}\n", l.trim())).collect();
    expect![[r#"
        %2 = dot %0, %1 over [hidden] tf32 : f32[batch, out] holds %2 {}  // forward @0:4:3+30
        %14 = dot %12, %13 over [batch] tf32 : f32[hidden, out] holds %12 {}  // backward @0:4:3+30
    "#]]
    .assert_eq(&dots);
}

/// Each factor is off by 2^-11 of itself at most.
#[test]
fn marks_move_results_a_little() {
    for (model, words) in [(GPT2, "tf32 tp2 pp2 m2"), (LLAMA, "tf32 cp2 dp2 m2"), (MIXTRAL, "tf32 dp2 ep2 m1")] {
        let c = compiled(model.0, model.1, &case(words));
        let runner = Runner::new(&c, &case(words), &Ranges::new());
        let mut plain = c.job.clone();
        plain.kernels.iter_mut().for_each(|k| without_marks(&mut k.body));
        let [marked, plain] = [&c.job, &plain].map(|job| runner.outcomes(job).unwrap_or_else(|e| panic!("{words}: {e}")));
        for report in ["loss", "grad_norm"] {
            let (x, y) = (marked.0[report], plain.0[report]);
            assert!(x != y && (x - y).abs() < 0.01 * y.abs(), "{words}: {report} is {x}, and {y} of factors as they are");
        }
    }
}
