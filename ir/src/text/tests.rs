use super::samples::{every_op, graph, job, kernel, local, mesh, module, odd_body, options, program, schedule, sharded};
use super::*;
use crate::kernel::Family;
use crate::model::Train;
use crate::module::Graphs;
use crate::random::mix;
use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};

fn round_trip<T: PartialEq + std::fmt::Debug>(x: &T, print: impl Fn(&T) -> String, parse: impl Fn(&str) -> Result<T>) {
    let text = print(x);
    match parse(&text) {
        Ok(y) => {
            assert_eq!(print(&y), text);
            assert_eq!(&y, x, "{text}");
        }
        Err(e) => panic!("{e}\n{text}"),
    }
}

#[test]
fn graphs_read_back() {
    round_trip(&graph(), print_graph, parse_graph);
    round_trip(&Graph::default(), print_graph, parse_graph);
}

#[test]
fn every_op_reads_back() {
    let sample: BTreeSet<String> = every_op().iter().map(op::op_name).collect();
    let table: BTreeSet<String> = op::blanks().iter().map(op::op_name).collect();
    assert_eq!(sample, table);
    // In a graph, sub-axes have no names.
    round_trip(&Graph { body: odd_body(), ..graph() }, print_graph, parse_graph);
    round_trip(&Sharded { graph: Graph { body: odd_body(), ..graph() }, digits: vec![], ..every_value_replicated() }, print_sharded, parse_sharded);
}

/// [`odd_body`]'s length of shardings and reasons.
fn every_value_replicated() -> Sharded {
    let count = odd_body().nodes.len();
    Sharded { shardings: vec![crate::sharded::Sharding::replicated(&mesh()); count], reasons: vec![None; count], ..sharded() }
}

#[test]
fn op_names_are_unique() {
    let names: BTreeSet<String> = op::blanks().iter().map(op::op_name).collect();
    assert_eq!(names.len(), op::blanks().len());
}

#[test]
fn sharded_graphs_read_back() {
    round_trip(&sharded(), print_sharded, parse_sharded);
}

#[test]
fn local_graphs_read_back() {
    round_trip(&local(), print_local, parse_local);
    let mut alternating = local();
    alternating.chunks.reverse();
    round_trip(&alternating, print_local, parse_local);
}

#[test]
fn kernels_read_back() {
    round_trip(&kernel(), print_kernel, parse_kernel);
    for family in [Family::Gemm, Family::Attention, Family::AttentionGrad, Family::Scatter] {
        round_trip(&Kernel { family, ..kernel() }, print_kernel, parse_kernel);
    }
}

#[test]
fn programs_read_back() {
    round_trip(&(mesh(), program(), vec![(0, schedule()), (3, CallSchedule::default())]), print_program, parse_program);
}

#[test]
fn jobs_read_back() {
    round_trip(&job(), print_job, parse_job);
    round_trip(&Job { train: Train::default(), ..job() }, print_job, parse_job);
}

#[test]
fn modules_read_back() {
    let blank = module::blank_module();
    round_trip(&blank, print_module, parse_module);
    for options in options() {
        round_trip(&Module { options, ..blank.clone() }, print_module, parse_module);
    }
    round_trip(&module(), print_module, parse_module);
    let logical = Module { training: Graphs::new(graph()), evaluation: Graphs::new(graph()), job: None, ..module() };
    round_trip(&logical, print_module, parse_module);
    // One list of local graphs may be there without the other.
    let one = |stages: Vec<Local>, locals| Module { training: Graphs { stages, locals, ..module().training }, ..module() };
    round_trip(&one(vec![local()], vec![]), print_module, parse_module);
    round_trip(&one(vec![], vec![local(), local()]), print_module, parse_module);
}

#[test]
fn lines_that_begin_with_a_semicolon_are_comments() {
    let text = print_graph(&graph());
    let commented = text.replace("body:\n", "; of all ops\n\nbody:\n  ;; the first\n");
    assert_eq!(parse_graph(&format!("; a graph\n;\n{commented}; its end")), Ok(graph()));
    assert_eq!(parse_module("module").map(|m| print_module(&m)), Ok("module\n".into()));
    let amid = text.replace(" : f32", " ; of f32\n : f32");
    assert_eq!(parse_graph(&amid).map_err(|e| e.to_string()), Err("7:20: expected `:`, found `;`".into()));
}

#[test]
fn a_broken_graph_prints() {
    let mut broken = graph();
    broken.body.nodes[2].ty.dims.push(crate::dim::Dim(99));
    broken.body.nodes[2].args.push(crate::graph::Value(77));
    broken.body.nodes[3].op = crate::op::Op::Reshard { kind: crate::op::Reshard::Mask, subs: vec![crate::mesh::SubAxis(200)] };
    let text = print_graph(&broken);
    assert!(text.contains("dot %0, %1, %77 over [hidden] : f32[batch, hidden#1, ?99]"), "{text}");
    let error = parse_graph(&text).map(|_| ()).map_err(|e| e.text);
    assert_eq!(error, Err("%77 does not exist yet".into()));
    let short = Sharded { shardings: vec![], reasons: vec![], digits: vec![], ..sharded() };
    assert!(print_sharded(&short).contains("%5"));
    print_local(&Local { chunks: vec![], accumulate: vec![], source: vec![], reasons: vec![], mesh: Mesh { subs: vec![] }, ..local() });
}

/// The error of a text that differs in one place.
fn error(from: &str, to: &str) -> String {
    let text = print_graph(&graph());
    assert!(text.contains(from), "{text}");
    parse_graph(&text.replacen(from, to, 1)).expect_err("a broken text").to_string()
}

#[test]
fn errors_name_the_place() {
    expect_test::expect![[r#"
        9:7: no op is called `dott`
        9:25: no dim is called `heads`
        9:15: %2 does not exist yet
        10:4: the next number is 3
        7:45: expected a phase (forward, backward, update), found `sideways`
        4:16: `8888888888888888888888888` is out of range
        4:16: expected a number, found `eight`
        5:6: the next dim of this name is `hidden#1`
        14:61: expected a number, found `0.0.2`
        18:22: a text without its closing quote
        1:14: expected the end of the line, found `4`
        6:1: expected `body:`, found `nodes:`
        7:22: expected an element type (f32, bf16, f16, i32, bool), found `f33[batch,`
        20:1: expected a line that belongs here, found `whole_loss`"#]]
    .assert_eq(
        &[
            error("dot", "dott"),
            error("over [hidden]", "over [heads]"),
            error("%0, %1", "%0, %2"),
            error("  %3", "  %4"),
            error("// forward", "// sideways"),
            error("= 8", "= 8888888888888888888888888"),
            error("= 8", "= eight"),
            error("hidden#1", "hidden#2"),
            error("init normal 0.02", "init normal 0.0.2"),
            error("\"sum of y\"", "\"sum of y"),
            error("graph tiny", "graph"),
            error("body:", "nodes:"),
            error("f32[", "f33["),
            error("total_loss", "whole_loss"),
        ]
        .join("\n"),
    );
}

/// Damages texts at random places; whatever still reads must print and read the same again.
fn fuzz<T>(text: &str, print: impl Fn(&T) -> String, parse: impl Fn(&str) -> Result<T>) {
    const SCRAPS: &[&str] = &[
        "",
        "0",
        "9",
        "99999999999999999999",
        "-",
        ".",
        "..",
        "\n",
        " ",
        "\"",
        "\\",
        "\\u{",
        "%",
        "#",
        "*",
        "/",
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        ",",
        ":",
        "+",
        "@",
        "é",
        "nan",
        "tp",
        "axis250",
        "sum",
    ];
    let mut state = 1;
    let mut random = |n: usize| {
        state = mix(state);
        state as usize % n
    };
    for _ in 0..1500 {
        let mut chars: Vec<String> = text.chars().map(String::from).collect();
        for _ in 0..=random(3) {
            let from = random(chars.len());
            let len = [0, 1, 1, 3, 20][random(5)].min(chars.len() - from - 1);
            let scrap = match random(3) {
                0 => {
                    let other = random(chars.len());
                    chars[other..chars.len().min(other + 1 + random(30))].concat()
                }
                _ => SCRAPS[random(SCRAPS.len())].into(),
            };
            chars.splice(from..from + len, [scrap]);
        }
        let damaged = chars.concat();
        match parse(&damaged) {
            Err(e) => assert!(e.line >= 1 && e.line <= damaged.matches('\n').count() + 1),
            Ok(x) => {
                let again = print(&x);
                match parse(&again) {
                    Ok(y) => assert_eq!(print(&y), again),
                    Err(e) => panic!("{e}\n{again}"),
                }
            }
        }
    }
}

#[test]
fn parsers_of_damaged_texts_neither_panic_nor_change_what_they_read() {
    fuzz(&print_graph(&graph()), print_graph, parse_graph);
    fuzz(&print_sharded(&sharded()), print_sharded, parse_sharded);
    fuzz(&print_local(&local()), print_local, parse_local);
    fuzz(&print_kernel(&kernel()), print_kernel, parse_kernel);
    fuzz(&print_job(&job()), print_job, parse_job);
    fuzz(&print_module(&module()), print_module, parse_module);
    fuzz(&print_graph(&Graph { body: odd_body(), ..graph() }), print_graph, parse_graph);
}

#[test]
fn a_graph_in_text() {
    expect_test::expect![[r#"
        graph tiny layers 4
        dims:
          dim batch = 4
          dim hidden = 8
          dim hidden#1 = 8 copy of hidden
        body:
          %0 = input 0 (x) : f32[batch, hidden]  // forward
          %1 = param 0 (layers.3.proj.w) : f32[hidden, hidden#1]  // forward
          %2 = dot %0, %1 over [hidden] : f32[batch, hidden#1]  // forward layers.3.proj layer 3 @0:23:11+6
          %3 = reduce_sum %2 over [batch, hidden#1] : f32[]  // forward
          %4 = reduce_sum %0 over [batch] : f32[hidden]  // backward layers.3.proj layer 3 @0:23:11+6
          %5 = sub %1, %4 : f32[hidden, hidden#1]  // update layer 3 @0:23:11+6
        batch batch
        param 0 layers.3.proj.w : f32[hidden, hidden#1] init normal 0.02 decay lr_scale 2.0 adam layer 3 @0:2:3+1
        input 0 x : f32[batch, hidden] default prev 0 first -1 any
        table 0 "rope sin" : f32[batch] = [0.1, -0.0, inf, 1e-300]
        loss loss = %3
        metric "sum of y" = %3
        output y = %2
        total_loss %3
        grad_norm %3
        grad 0 = %4
        update 0 from %4 to %5 states [%1, %4]
        update 0 to %5 states []
    "#]]
    .assert_eq(&print_graph(&graph()));
}

#[test]
fn a_sharded_graph_in_text() {
    expect_test::expect![[r#"
        sharded
        mesh [mb.0=2, dp.0=2, tp.0=2, tp.1=2]
        graph tiny layers 4
        dims:
          dim batch = 4
          dim hidden = 8
          dim hidden#1 = 8 copy of hidden
        body:
          %0 = input 0 (x) : f32[batch, hidden] {batch:mb*dp}  // forward
          %1 = param 0 (layers.3.proj.w) : f32[hidden, hidden#1] {}  // forward
          %2 = dot %0, %1 over [hidden] : f32[batch, hidden#1] {batch:mb*dp, hidden#1:tp.0}  // forward layers.3.proj layer 3 @0:23:11+6
          %3 = reduce_sum %2 over [batch, hidden#1] : f32[] {sum(mb*dp), max(tp.0), hidden#1:tp.1}  // forward
          %4 = reduce_sum %0 over [batch] : f32[hidden] {}  // backward layers.3.proj layer 3 @0:23:11+6
          %5 = sub %1, %4 : f32[hidden, hidden#1] {}  // update layer 3 @0:23:11+6
          %6 = reshard.all_gather %2 over tp.0 : f32[batch, hidden#1] {}  // forward layers.3.proj layer 3 @0:23:11+6 because "the output \"y\" is asked for whole" avoided by unlisted tp "odd \"name\""
        batch batch
        param 0 layers.3.proj.w : f32[hidden, hidden#1] init normal 0.02 decay lr_scale 2.0 adam layer 3 @0:2:3+1
        input 0 x : f32[batch, hidden] default prev 0 first -1 any
        table 0 "rope sin" : f32[batch] = [0.1, -0.0, inf, 1e-300]
        loss loss = %3
        metric "sum of y" = %3
        output y = %6
        total_loss %3
        grad_norm %3
        grad 0 = %4
        update 0 from %4 to %5 states [%1, %4]
        update 0 to %5 states []
        digits:
          batch: mb*dp
          hidden#1: tp.0
    "#]].assert_eq(&print_sharded(&sharded()));
}

#[test]
fn a_local_graph_in_text() {
    expect_test::expect![[r#"
        local
        mesh [mb.0=2, dp.0=2, tp.0=2, tp.1=2]
        stage 0 params [0, 2]
        stage 1 params [1, 3]
        slot 0 index [[8]] states 2
        copied [0]
        bucket 0 of 128 copies [0 @64 index [[2] + 2*dp, [8]]]
        bucket 1 of 0 weights []
        dims:
          dim batch/mb*dp = 1 logical 4 global 4 index [1] + 2*mb + 1*dp
          dim hidden = 8
          dim part = 2
        body:
        forward:
          %0 = input 0 : f32[batch/mb*dp, hidden]  // forward
          %1 = param 0 : f32[hidden]  // forward
        forward stage 1:
          %2 = all_gather %1 over tp.0 part part : f32[part, hidden] holds %2 {}  // forward because "w is needed whole"
        backward stage 1:
          %3 = reduce_sum %0 over [batch/mb*dp] : f32[hidden] accumulate holds %3 {sum(mb), d0:dp}  // backward layers.3 layer 3 @0:23:11+6
        reduce:
          %4 = all_reduce.sum %3 over dp : f32[hidden]  // backward layers.3 layer 3 @0:23:11+6 because "the gradient of w is a sum over dp"
        in host [%1, %4]
        report 1 = %4
        update 0 to %4 states [%1, %4]
    "#]]
    .assert_eq(&print_local(&local()));
}

#[test]
fn a_kernel_in_text() {
    expect_test::expect![[r#"
        kernel loops on host scalars [i32, f32]
        dims:
          dim i = 4
          dim j = 8
        body:
          %0 = input 0 : bf16[i, j]  // forward layers.0.norm layer 3 @0:23:11+6
          %1 = exp %0 : bf16[i, j]  // forward layers.0.norm layer 3 @0:23:11+6
        grid [i]
        operand bf16[i, j] strides [16, 1] unaligned
        result %1 strides [8, 1] accumulate
    "#]]
    .assert_eq(&print_kernel(&kernel()));
}

#[test]
fn a_program_in_text() {
    expect_test::expect![[r#"
        mesh [mb.0=2, dp.0=2, tp.0=2, tp.1=2]
        program
        arena persistent bytes 192
        arena stash bytes 128
        arena temporary bytes 64
        arena host_stash bytes 64
        arena staging bytes 128
        arena disk bytes 8192
        stash bytes 64
        stash bytes 64 on host
        stash bytes 64
        buffer layers.3.w : f32[batch/dp=2, hidden=8] in persistent @0 bytes 64 holds param 0 index [[2] + 2*dp, [8]]
        buffer x : f32[batch/dp=2, hidden=8] in stash @64 bytes 64 holds activation  // forward x layer 3 @0:23:11+6
        buffer x#1 : f32[batch/dp=2, hidden=8] in temporary @0 bytes 64 holds accumulator
        buffer train.%7-m : f32[batch/dp=2, hidden=8] in persistent @64 bytes 64 holds state 1 of 0 index [[2] + 2*dp, [8]]
        buffer layers.3.w.state0 : f32[batch/dp=2, hidden=8] in host @0 bytes 64 holds state 0 of 0 index [[2] + 2*dp, [8]]
        buffer staged : f32[batch/dp=2, hidden=8] in staging @64 bytes 64 holds activation
        buffer "rope table" : f32[batch/dp=2, hidden=8] in persistent @128 bytes 64 holds table 2 index []
        buffer kept : f32[batch/dp=2, hidden=8] in host_stash @0 bytes 64 holds activation
        buffer layers.3.w.state2 : f32[batch/dp=2, hidden=8] in disk @4096 bytes 64 holds state 2 of 0 index [[2] + 2*dp, [8]]
        group 0 over tp
        group 1 over none stages [0, 1]
        copied [1, 3]
        bucket 0 of 128 copies [0 @64 index [[2] + 2*dp, [8]]]
        bucket 1 of 0 weights []
        body forward kind forward
          compute load input 0 to x index [[2] + 2*dp, [8]]  // forward layers.3.proj layer 3 @0:23:11+6
          compute launch kernel 0 [layers.3.w, x @16 + 64*tp.0 + 32*tp.1] scalars [seed, linear 8*dp]  // forward layers.3.proj layer 3 @0:23:11+6
          compute record 0  // forward layers.3.proj layer 3 @0:23:11+6
          tensor collective all_reduce.sum group 0 4096 x bf16 from x to x @16 + 64*tp.0 + 32*tp.1  // forward layers.3.proj layer 3 @0:23:11+6 because "proj needs its operand whole" avoided by sp off
          compute wait 0  // forward layers.3.proj layer 3 @0:23:11+6
        body backward kind backward stage 1 cut at [2, 3]
          compute recv hops -1 channel 2 8 x f32 to x  // forward layers.3.proj layer 3 @0:23:11+6
          compute send hops 1 channel 0 8 x f32 from x#1  // forward layers.3.proj layer 3 @0:23:11+6
          compute fill layers.3.w.state0 with -0.5  // forward layers.3.proj layer 3 @0:23:11+6
          compute report 1 from x @16 + 64*tp.0 + 32*tp.1  // forward layers.3.proj layer 3 @0:23:11+6
          compute limit x @16 + 64*tp.0 + 32*tp.1 to 96  // forward layers.3.proj layer 3 @0:23:11+6
          to_host copy 16 x f32 from x @16 + 64*tp.0 + 32*tp.1 to staged if x @16 + 64*tp.0 + 32*tp.1  // forward layers.3.proj layer 3 @0:23:11+6
        body reduce kind reduce
        body reduce#1 kind update
          from_disk copy 16 x f32 from layers.3.w.state2 to staged  // forward layers.3.proj layer 3 @0:23:11+6
        body "" kind prologue
        stage 1 slots [2 @64, 1 @192]
        train:
          "" 0
          forward 0..3
          backward 0 part 0
          forward 3
          backward 1..4
          backward 3 part 1
          backward 2 part 1..3
          backward 3 part 2
          reduce 0
        update:
          reduce#1 0
          reduce#1 0
        eval:
          forward 4294967295
          forward 0
        sends of train: [1 after 0, 0 with 2]
        sends of eval: [0 after 7]
    "#]].assert_eq(&print_program(&(mesh(), program(), vec![(1, schedule())])));
}

#[test]
fn what_a_module_says_before_its_graphs() {
    let text = print_module(&module());
    let (head, _) = text.split_once("training:\n").expect("graphs");
    expect_test::expect![[r#"
        module
        setting batch = "4"
        setting path = "a \"b\"\tc"
        asks training
        optimizer sgd momentum 0.9 weight_decay 0.1 clip 1.0 loss_scale dynamic 4294967296.0 least 1.0 window 1000 hysteresis 2
        schedule minus_sqrt peak 0.001 min 1e-5 warmup 10 steps 100 falling 20 constant 5
        plan tp = [[heads, "odd name"], []] @0:4:2+9
        plan attention.cp = []
        options
          dp 2
          cp 4
          tp 8
          pp 3
          ep 2
          micro_batch 5
          global_batch 40
          pad_vocab_to 128
          replicas 2
          etp 1
          vpp 2
          group 4
          bucket_size 1048576
          logits_chunks 8
          sp on
          cp_comm all_to_all_and_ring
          zero params
          schedule given v
            stage 0: [F0.0, B1.12, W0.3]
            stage 1: []
          layout even loss
          overlap off
          memory_order memory
          offload optimizer
          param_offload disk
          activation_offload marked of 2
          serial_exchanges on
          tf32 on
          pass_pairs on
          split_k for sm_90a
          tp_overlap pipeline 4
          recompute uniform 2
          rows random 7
          moe_buffer factor 1.25
          moe_passes 3
        mesh [mb.0=2, dp.0=2, tp.0=2, tp.1=2]
        layout 2 stages x 2 v embedding 0 loss 3 layers [0, 1, 1, 3]
        order v
            stage 0: [F0.0, B1.12, W0.3]
            stage 1: []
        takes [any, [0 to 255], []]
    "#]]
    .assert_eq(head);
}

#[test]
fn a_graph_in_mlir() {
    expect_test::expect![[r#"
        "builtin.module"() ({
          "mcc.graph"() ({
            %0 = "mcc.input"() {value = 0 : i64, dims = ["batch", "hidden"], phase = "forward", name = "x", default = "prev 0 first -1"} : () -> tensor<4x8xf32> loc(unknown)
            %1 = "mcc.param"() {value = 0 : i64, dims = ["hidden", "hidden#1"], phase = "forward", name = "layers.3.proj.w", init = "normal 0.02"} : () -> tensor<8x8xf32> loc(unknown)
            %2 = "mcc.dot"(%0, %1) {over = ["hidden"], dims = ["batch", "hidden#1"], phase = "forward", layer = 3 : i64} : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32> loc("layers.3.proj"("0":23:11))
            %3 = "mcc.reduce_sum"(%2) {over = ["batch", "hidden#1"], dims = [], phase = "forward"} : (tensor<4x8xf32>) -> tensor<f32> loc(unknown)
            %4 = "mcc.reduce_sum"(%0) {over = ["batch"], dims = ["hidden"], phase = "backward", layer = 3 : i64} : (tensor<4x8xf32>) -> tensor<8xf32> loc("layers.3.proj"("0":23:11))
            %5 = "mcc.sub"(%1, %4) {dims = ["hidden", "hidden#1"], phase = "update", layer = 3 : i64} : (tensor<8x8xf32>, tensor<8xf32>) -> tensor<8x8xf32> loc("0":23:11)
            "mcc.report"(%3) {kind = "loss", name = "loss"} : (tensor<f32>) -> () loc(unknown)
            "mcc.report"(%3) {kind = "metric", name = "sum of y"} : (tensor<f32>) -> () loc(unknown)
            "mcc.report"(%2) {kind = "output", name = "y"} : (tensor<4x8xf32>) -> () loc(unknown)
            "mcc.report"(%3) {kind = "total_loss", name = "total_loss"} : (tensor<f32>) -> () loc(unknown)
            "mcc.report"(%3) {kind = "grad_norm", name = "grad_norm"} : (tensor<f32>) -> () loc(unknown)
            "mcc.grad"(%4) {param = 0 : i64} : (tensor<8xf32>) -> () loc(unknown)
            "mcc.update"(%4, %5, %1, %4) {param = 0 : i64} : (tensor<8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8xf32>) -> () loc(unknown)
            "mcc.update"(%5) {param = 0 : i64} : (tensor<8x8xf32>) -> () loc(unknown)
            "mcc.end"() : () -> () loc(unknown)
          }) {name = "tiny", layers = 4 : i64} : () -> () loc(unknown)
        }) : () -> () loc(unknown)
    "#]].assert_eq(&mlir::export_graph(&graph()));
}

#[test]
fn a_sharded_graph_in_mlir() {
    expect_test::expect![[r#"
        "builtin.module"() ({
          "mcc.sharded"() ({
            %0 = "mcc.input"() {value = 0 : i64, dims = ["batch", "hidden"], phase = "forward", name = "x", default = "prev 0 first -1", sharding = "{batch:mb*dp}"} : () -> tensor<4x8xf32> loc(unknown)
            %1 = "mcc.param"() {value = 0 : i64, dims = ["hidden", "hidden#1"], phase = "forward", name = "layers.3.proj.w", init = "normal 0.02", sharding = "{}"} : () -> tensor<8x8xf32> loc(unknown)
            %2 = "mcc.dot"(%0, %1) {over = ["hidden"], dims = ["batch", "hidden#1"], phase = "forward", layer = 3 : i64, sharding = "{batch:mb*dp, hidden#1:tp.0}"} : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32> loc("layers.3.proj"("0":23:11))
            %3 = "mcc.reduce_sum"(%2) {over = ["batch", "hidden#1"], dims = [], phase = "forward", sharding = "{sum(mb*dp), max(tp.0), hidden#1:tp.1}"} : (tensor<4x8xf32>) -> tensor<f32> loc(unknown)
            %4 = "mcc.reduce_sum"(%0) {over = ["batch"], dims = ["hidden"], phase = "backward", layer = 3 : i64, sharding = "{}"} : (tensor<4x8xf32>) -> tensor<8xf32> loc("layers.3.proj"("0":23:11))
            %5 = "mcc.sub"(%1, %4) {dims = ["hidden", "hidden#1"], phase = "update", layer = 3 : i64, sharding = "{}"} : (tensor<8x8xf32>, tensor<8xf32>) -> tensor<8x8xf32> loc("0":23:11)
            %6 = "mcc.reshard.all_gather"(%2) {over = "tp.0", dims = ["batch", "hidden#1"], phase = "forward", layer = 3 : i64, sharding = "{}", reason = "the output \22y\22 is asked for whole", avoided_by = "unlisted tp \22odd \5C\22name\5C\22\22"} : (tensor<4x8xf32>) -> tensor<4x8xf32> loc("layers.3.proj"("0":23:11))
            "mcc.report"(%3) {kind = "loss", name = "loss"} : (tensor<f32>) -> () loc(unknown)
            "mcc.report"(%3) {kind = "metric", name = "sum of y"} : (tensor<f32>) -> () loc(unknown)
            "mcc.report"(%6) {kind = "output", name = "y"} : (tensor<4x8xf32>) -> () loc(unknown)
            "mcc.report"(%3) {kind = "total_loss", name = "total_loss"} : (tensor<f32>) -> () loc(unknown)
            "mcc.report"(%3) {kind = "grad_norm", name = "grad_norm"} : (tensor<f32>) -> () loc(unknown)
            "mcc.grad"(%4) {param = 0 : i64} : (tensor<8xf32>) -> () loc(unknown)
            "mcc.update"(%4, %5, %1, %4) {param = 0 : i64} : (tensor<8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8xf32>) -> () loc(unknown)
            "mcc.update"(%5) {param = 0 : i64} : (tensor<8x8xf32>) -> () loc(unknown)
            "mcc.end"() : () -> () loc(unknown)
          }) {name = "tiny", mesh_axes = ["mb.0", "dp.0", "tp.0", "tp.1"], mesh_sizes = [2 : i64, 2 : i64, 2 : i64, 2 : i64]} : () -> () loc(unknown)
        }) : () -> () loc(unknown)
    "#]].assert_eq(&mlir::export_sharded(&sharded()));
}

/// Where MLIR's tool is installed: it must accept every export.
#[test]
fn mlir_opt_accepts_the_exports() {
    let texts = [
        mlir::export_graph(&graph()),
        // This body has every op with its fields, and names that need quotes.
        mlir::export_sharded(&Sharded { graph: Graph { body: odd_body(), ..graph() }, ..every_value_replicated() }),
        mlir::export_sharded(&sharded()),
        mlir::export_local(&local()),
    ];
    for text in texts {
        let command = Command::new("mlir-opt-22")
            .args(["--allow-unregistered-dialect", "-o", "/dev/null", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = command.expect("mlir-opt-22 is installed (`make deps`)");
        child.stdin.take().expect("piped").write_all(text.as_bytes()).expect("mlir-opt reads");
        let output = child.wait_with_output().expect("mlir-opt ends");
        assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
    }
}
