use crate::object::{self, Emit};
use crate::target::Target;
use crate::testing::{KernelDraft, check, check_with, emulate, random_inputs, run, run_ptx_shifted};
use ir::graph::Type;
use ir::kernel::{Family, Kernel};
use ir::op::{Binary, DType, Op};

fn scatter(base: bool, epilogue: bool) -> Kernel {
    let mut make = KernelDraft::default();
    let [b, s, h] = [("b", 2), ("s", 9), ("h", 21)].map(|(n, s)| make.dim(n, s));
    let v = make.sharded_dim("v", if base { 4 } else { 37 }, 37, 0);
    make.scalar(DType::I32);
    let values = make.input(DType::F32, &[b, s, h]);
    let index = make.input(DType::I32, &[b, s]);
    let mut table = make.op_as(Op::Scatter { dim: v }, &[values, index], Type::new(DType::F32, [v, h]));
    if epilogue {
        let old = make.input(DType::F32, &[v, h]);
        table = make.op(Op::Add, &[table, old]);
    }
    make.kernel(Family::Scatter, &[table])
}

#[test]
fn rows_are_summed_by_index_and_missing_rows_are_skipped() {
    for (base, epilogue) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut kernel = scatter(base, epilogue);
        check(&kernel, &[if base { 3.0 } else { 0.0 }], 1e-6);
        kernel.outputs[0].accumulate = true;
        check(&kernel, &[if base { 3.0 } else { 0.0 }], 1e-6);
    }
}

#[test]
fn rows_and_chunks_of_columns_are_dealt_out_and_summed_in_storage_order() {
    // The first size has several owners and chunks on a GPU, the last chunk partial. In the second, rows are so long
    // that a chunk has several vectors.
    for (rows, columns) in [(200, 75), (5, 4200)] {
        for (epilogue, accumulate) in [(false, false), (false, true), (true, false)] {
            let mut make = KernelDraft::default();
            let [b, s, v, h] = [("b", 2), ("s", 40), ("v", rows), ("h", columns)].map(|(n, s)| make.dim(n, s));
            let values = make.input(DType::F32, &[b, s, h]);
            let index = make.input(DType::I32, &[b, s]);
            let mut table = make.op_as(Op::Scatter { dim: v }, &[values, index], Type::new(DType::F32, [v, h]));
            if epilogue {
                let old = make.input(DType::F32, &[v, h]);
                table = make.op(Op::Binary(Binary::Mul), &[table, old]);
            }
            let mut kernel = make.kernel(Family::Scatter, &[table]);
            kernel.outputs[0].accumulate = accumulate;
            let mut inputs = random_inputs(&kernel, 3, rows);
            // Half of the indices name one of three rows; some name no row.
            for (at, id) in inputs[1].iter_mut().enumerate() {
                *id = [(at % 3) as f64, *id, 0.0, *id, 1.0, *id, 2.0, if at % 16 == 7 { -1.0 } else { rows as f64 }][at % 8];
            }
            check_with(&kernel, &inputs, &[], 1e-5);
            let host = Target::host().expect("a supported machine");
            let [here, there] = [run(&kernel, &host, &inputs, &[], 2.0), emulate(&kernel, &Target::gpu("sm_90a"), &inputs, &[], 2.0)];
            assert!(here == there, "{rows} rows of {columns} columns are added in another order");
        }
    }
}

/// A scatter of computed values in 16 bits, of 300 indices: two groups of vectors that a GPU asks for together, one
/// more, and a part of one.
fn wide_scatter(columns: u64, result: DType) -> Kernel {
    let mut make = KernelDraft::default();
    let [s, v, h] = [("s", 300), ("v", 50), ("h", columns)].map(|(n, s)| make.dim(n, s));
    let values = make.input(DType::Bf16, &[s, h]);
    let weight = make.input(DType::Bf16, &[s]);
    let index = make.input(DType::I32, &[s]);
    let scaled = make.op(Op::Binary(Binary::Mul), &[values, weight]);
    let table = make.op_as(Op::Scatter { dim: v }, &[scaled, index], Type::new(result, [v, h]));
    make.kernel(Family::Scatter, &[table])
}

#[test]
fn lanes_have_runs_of_the_columns_of_a_scatter() {
    // Of the columns the last ones are not whole runs of all lanes, so lanes have one each.
    for (columns, result, wide) in [(256, DType::Bf16, true), (512, DType::F32, true), (264, DType::Bf16, false)] {
        let mut kernel = wide_scatter(columns, result);
        for accumulate in [false, true] {
            kernel.outputs[0].accumulate = accumulate;
            let mut inputs = random_inputs(&kernel, 4, 50);
            // A third of the indices name one row, and some name none.
            for (at, id) in inputs[2].iter_mut().enumerate() {
                *id = [*id, 7.0, if at % 16 == 7 { -1.0 } else { *id }][at % 3];
            }
            check_with(&kernel, &inputs, &[], 1e-2);
            let (host, gpu) = (Target::host().expect("a supported machine"), Target::gpu("sm_90a"));
            let [here, there] = [run(&kernel, &host, &inputs, &[], 2.0), emulate(&kernel, &gpu, &inputs, &[], 2.0)];
            assert!(here == there, "{columns} columns are added in another order");
            let compiled = object::compile(&kernel, &gpu, Emit::default()).expect("the kernel compiles");
            let ptx = String::from_utf8(compiled.object.clone()).expect("PTX is text");
            assert_eq!(ptx.contains("ld.global.v4"), wide, "{columns} columns");
            // Where an output begins is found at run time.
            let shifted = run_ptx_shifted(&kernel, &compiled, &ptx, emulator::Options::default(), &inputs, &[], 2.0, [0, 4]);
            assert!(shifted.expect("outputs may begin anywhere").0 == there, "{columns} columns");
        }
    }
}

#[test]
fn a_scatter_may_keep_dims_of_its_index() {
    let mut make = KernelDraft::default();
    let [b, s, v, h] = [("b", 2), ("s", 9), ("v", 7), ("h", 5)].map(|(n, s)| make.dim(n, s));
    let values = make.input(DType::F32, &[b, s, h]);
    let index = make.input(DType::I32, &[b, s]);
    let table = make.op_as(Op::Scatter { dim: v }, &[values, index], Type::new(DType::F32, [h, b, v]));
    check(&make.kernel(Family::Scatter, &[table]), &[], 1e-6);
}
