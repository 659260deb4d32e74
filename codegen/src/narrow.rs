//! Which values of a kernel are as good as 16-bit floats, so that a GPU may approximate the functions that make them.
//!
//! A value is if all that it is made of, or all that is made of it, has 16 bits: the activation between a product and
//! what is stored of it, the exponentials of logits. An update of weights in f32 is not, though its gradient may have
//! 16 bits: it is exact, the same on every device.

use ir::kernel::Kernel;
use ir::op::{DType, Op};

/// How exact the sources of a value are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SourceWidth {
    /// Only constants and integers: as exact as what they are combined with.
    Numbers,
    Narrow,
    Wide,
}

/// For each value of a kernel's body, in order, whether it is as good as 16-bit floats.
pub fn values(kernel: &Kernel) -> Vec<bool> {
    let nodes = &kernel.body.nodes;
    let narrow = |dtype: DType| matches!(dtype, DType::Bf16 | DType::F16);
    let mut from: Vec<SourceWidth> = Vec::with_capacity(nodes.len());
    for node in nodes {
        let of_args = node.args.iter().map(|a| from[a.index()]).max().unwrap_or(SourceWidth::Numbers);
        from.push(match &node.op {
            _ if narrow(node.ty.dtype) => SourceWidth::Narrow,
            Op::Input(_) | Op::Scalar(_) if node.ty.dtype == DType::F32 => SourceWidth::Wide,
            _ => of_args,
        });
    }
    let mut to = vec![true; nodes.len()];
    for output in &kernel.outputs {
        to[output.value.index()] = narrow(nodes[output.value.index()].ty.dtype);
    }
    for (v, node) in nodes.iter().enumerate().rev() {
        for a in &node.args {
            to[a.index()] &= narrow(node.ty.dtype) || to[v];
        }
    }
    from.iter().zip(to).map(|(from, to)| *from == SourceWidth::Narrow || to).collect()
}

#[cfg(test)]
mod tests {
    use super::values;
    use crate::object::{self, Emit};
    use crate::target::Target;
    use crate::testing::KernelDraft;
    use ir::graph::{Type, Value};
    use ir::kernel::{Family, Kernel};
    use ir::op::{Binary, DType, Op, Unary};

    /// A function of `x`, of one type, times `y`, of another, stored in a third; which of both are as good as 16-bit
    /// floats.
    fn of([x, y, stored]: [DType; 3]) -> (Kernel, [bool; 2]) {
        let mut make = KernelDraft::default();
        let h = make.dim("h", 64);
        let wide = |make: &mut KernelDraft, v: Value| make.op_as(Op::Cast, &[v], Type::new(DType::F32, [h]));
        let [x, y] = [x, y].map(|dtype| {
            let v = make.input(dtype, &[h]);
            if dtype == DType::F32 { v } else { wide(&mut make, v) }
        });
        let function = make.op(Op::Unary(Unary::Exp), &[x]);
        let product = make.op(Op::Binary(Binary::Div), &[function, y]);
        let out = if stored == DType::F32 { product } else { make.op_as(Op::Cast, &[product], Type::new(stored, [h])) };
        let kernel = make.kernel(Family::Loops { grid: vec![h] }, &[out]);
        let narrow = values(&kernel);
        (kernel, [narrow[function.index()], narrow[product.index()]])
    }

    #[test]
    fn a_value_is_as_good_as_what_it_is_made_of_or_what_is_made_of_it() {
        use DType::{Bf16, F16, F32};
        assert_eq!(of([F32, F32, F32]).1, [false, false]);
        assert_eq!(of([F32, F32, Bf16]).1, [true, true], "what is stored has 16 bits");
        assert_eq!(of([F16, F16, F32]).1, [true, true], "what is read has 16 bits");
        assert_eq!(of([Bf16, F32, F32]).1, [true, false], "an update by a gradient of 16 bits");
        assert_eq!(of([F32, Bf16, F32]).1, [false, false]);
    }

    #[test]
    fn the_hardware_approximates_those_alone() {
        use DType::{Bf16, F32};
        for (dtypes, exp, rcp) in [([F32, F32, F32], false, false), ([Bf16, F32, F32], true, false), ([F32, F32, Bf16], true, true)] {
            let compiled = object::compile(&of(dtypes).0, &Target::gpu("sm_80"), Emit::default()).expect("the kernel compiles");
            let text = String::from_utf8(compiled.object).expect("PTX is text");
            assert_eq!([text.contains("ex2.approx"), text.contains("rcp.approx")], [exp, rcp], "{text}");
        }
    }
}
