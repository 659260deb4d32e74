//! Operands: what commands are passed, and where it lies.

use super::*;

#[test]
fn a_launch_passes_as_many_places_as_its_kernel_has_operands() {
    refused(
        edit_launch(0, "forward", 1, |_, args, _| drop(args.pop())),
        Invariant::PlaceCount,
        "stage 0, forward, command 1 (launch of kernel 0): 2 places for the kernel's 3 operands",
    );
}

#[test]
fn a_launch_passes_the_kernels_scalars() {
    refused(edit_launch(0, "update", 0, |_, _, scalars| scalars.clear()), Invariant::ScalarType, "0 scalars, the kernel has 1");
    refused(edit_launch(0, "update", 0, |_, _, scalars| scalars[0] = Scalar::Step), Invariant::ScalarType, "scalar 0 is not f32");
    refused(edit_launch(0, "update", 0, |_, _, scalars| scalars[0] = Scalar::Slot(0)), Invariant::ScalarType, "scalar 0 is not f32");
}

#[test]
fn an_operand_stays_in_its_buffer_at_all_coordinates() {
    refused(
        edit_launch(0, "forward", 1, |_, args, _| args[1].offset = 1),
        Invariant::OperandRange,
        "it reaches element 4 of buffer `w`, which has 4",
    );
    refused(
        edit_launch(0, "forward", 1, |_, args, _| args[1].coords = vec![(SubAxis(2), 1)]),
        Invariant::OperandRange,
        "it reaches element 4 of buffer `w`, which has 4",
    );
    refused(edit_launch(0, "forward", 1, |_, args, _| args[1].coords = vec![(SubAxis(9), 1)]), Invariant::CoordinateAxis, "names no axis");
}

#[test]
fn an_operand_is_aligned_where_the_kernel_says_so() {
    let second_element = |job: &mut Job| {
        job.kernels[0].inputs[1].strides = vec![0];
        edit_launch(0, "forward", 1, |_, args, _| args[1].offset = 1)(job);
    };
    refused(second_element, Invariant::OperandAligned, "an operand in buffer `w` begins at no multiple of 16 bytes");
    let mut said = job();
    second_element(&mut said);
    said.kernels[0].inputs[1].unaligned = true;
    assert_eq!(verify(&said).map_err(|e| e.to_string()), Ok(()));
}

#[test]
fn operands_have_the_kernels_dtypes() {
    refused(|job| buffer(job, 0, "dy").dtype = DType::I32, Invariant::OperandType, "buffer `dy` is i32, not f32");
}

#[test]
fn a_shrunk_buffer_is_too_small() {
    refused(|job| buffer(job, 0, "y").dims[0].1 = 2, Invariant::OperandRange, "it reaches element 3 of buffer `y`, which has 2");
}

#[test]
fn another_kernel_does_not_fit() {
    refused(edit_launch(1, "forward", 1, |kernel, _, _| *kernel = UPDATE), Invariant::PlaceCount, "3 places for the kernel's 5 operands");
    refused(edit_launch(1, "forward", 1, |kernel, _, _| *kernel = KernelId(99)), Invariant::NamedThing, "there is no kernel 99");
}

#[test]
fn outputs_lie_apart_from_each_other() {
    refused(
        edit_launch(0, "update", 0, |_, args, _| args[4] = args[3].clone()),
        Invariant::OperandsApart,
        "output 1 overlaps operand 3 in buffer `w`",
    );
}

#[test]
fn only_a_pointwise_result_takes_the_place_of_its_operand() {
    let by_sum = |job: &mut Job| {
        job.kernels[MUL.index()] = sample::product_with_sum();
        edit_launch(0, "forward", 1, |_, args, _| args[2] = args[1].clone())(job);
    };
    refused(by_sum, Invariant::OperandsApart, "output 0 overlaps operand 1 in buffer `w`");
}

#[test]
fn where_a_command_writes_does_not_depend_on_coordinates() {
    let split = |job: &mut Job| {
        buffer(job, 0, "y").dims[0].1 = 8;
        edit_launch(0, "forward", 1, |_, args, _| args[2].coords = vec![(SubAxis(2), 4)])(job);
    };
    refused(split, Invariant::WriteFixed, "where it writes in buffer `y` depends on coordinates");
}

#[test]
fn parts_of_an_input_make_it_up() {
    let shift = |job: &mut Job| match &mut commands(job, 0, "forward")[0].action {
        Action::Load { index, .. } => index[0].base = Base::Coords(vec![(SubAxis(0), 8), (SubAxis(2), 8)]),
        other => panic!("{other:?}"),
    };
    refused(shift, Invariant::PartsCover, "the parts of dim `n` do not make up its 16 elements");
}

#[test]
fn parts_of_a_parameter_make_it_up() {
    let at = |base: Base| {
        move |job: &mut Job| match &mut buffer(job, 0, "w").content {
            Content::Param { index, .. } => index[0].base = base,
            other => panic!("{other:?}"),
        }
    };
    refused(
        at(Base::Coords(vec![(SubAxis(2), 4)])),
        Invariant::PartsCover,
        "stage 0, buffer `w`: the parts of dim `n` do not make up its 4 elements",
    );
    refused(at(Base::Coords(vec![(SubAxis(0), 4)])), Invariant::SplitAxes, "dim `n` cannot be split over `mb` here");
    refused(at(Base::Slot(0)), Invariant::SplitAxes, "begins at a kernel's scalar");
}

#[test]
fn every_parameter_slot_is_filled_and_held() {
    refused(|job| job.stages[1].params.clear(), Invariant::SlotFilled, "nothing fills parameter slot 0");
    refused(|job| job.stages[1].params.push(0), Invariant::SlotHeld, "no buffer holds parameter slot 1");
    refused(|job| job.stages[1].params[0] = 7, Invariant::NamedThing, "there is no parameter 7");
    refused(|job| job.stages[1].params[0] = 0, Invariant::ParameterPlaced, "job: no stage has parameter `w1`");
}
