//! What a small interleaved pipeline becomes, for review by diff.

use crate::harness::compiled;
use crate::models::case;
use expect_test::expect;
use ir::text::print_local;
use passes::report::pipeline_timeline::{UNIT, timeline};

const FOUR: &str = "
model four(batch, hidden = 4, layers = 4) {
  input x0: f32[batch, hidden];
  let x = x0;
  repeat layers {
    param w: [hidden] = 1;
    x = x * w;
  }
  loss mean(x * x);
}
train { optimizer: sgd(momentum: 0.0); clip: 0.0; }
plan { dp: batch; pp: layers; }
";

#[test]
fn the_first_of_two_interleaved_stages() {
    let c = compiled(FOUR, &[], &case("pp2 v2 m2"));
    expect![[r#"
        local
        mesh [mb.0=2, pp.0=2]
        stage 0 params [0, 2]
        slot 0 index [[4]] states 0
        slot 1 index [[4]] states 0
        dims:
          dim batch/mb = 1 logical 2 global 2 index [1] + 1*mb
          dim hidden = 4
        body:
        forward:
          %0 = input 0 : f32[batch/mb, hidden] holds %0 {d0:mb}  // forward @0:3:3+28
          %1 = cut %0 : f32[batch/mb, hidden] holds %1 {d0:mb}  // forward layers.0 layer 0 @0:5:3+13
          %2 = param 0 : f32[hidden] holds %2 {}  // forward layers.0 layer 0 @0:6:5+21
          %3 = mul %1, %2 : f32[batch/mb, hidden] holds %3 {d0:mb}  // forward layers.0 layer 0 @0:7:5+9
          %4 = send %3 hops 1 channel 0 : f32[batch/mb, hidden]  // forward layers.0 layer 0 @0:7:5+9 because "crosses from stage to stage" avoided by one_rank pp
        forward stage 1:
          %5 = recv hops 1 channel 0 : f32[batch/mb, hidden] holds %6 {d0:mb}  // forward layers.1 layer 1 @0:7:5+9 because "crosses from stage to stage" avoided by one_rank pp
          %6 = cut %5 : f32[batch/mb, hidden] holds %7 {d0:mb}  // forward layers.2 layer 2 @0:5:3+13
          %7 = param 1 : f32[hidden] holds %8 {}  // forward layers.2 layer 2 @0:6:5+21
          %8 = mul %6, %7 : f32[batch/mb, hidden] holds %9 {d0:mb}  // forward layers.2 layer 2 @0:7:5+9
          %9 = send %8 hops 1 channel 2 : f32[batch/mb, hidden]  // forward layers.2 layer 2 @0:7:5+9 because "crosses from stage to stage" avoided by one_rank pp
        backward stage 1:
          %10 = recv hops 1 channel 3 : f32[batch/mb, hidden] holds %26 {d0:mb}  // backward layers.3 layer 3 @0:5:3+13 because "crosses from stage to stage" avoided by one_rank pp
          %11 = param 1 : f32[hidden] holds %8 {}  // forward layers.2 layer 2 @0:6:5+21
          %12 = mul %10, %11 : f32[batch/mb, hidden] holds %27 {d0:mb}  // backward layers.2 layer 2 @0:7:5+9
          %13 = dot %10, %6 over [batch/mb] : f32[hidden] accumulate holds %28 {sum(mb)}  // backward layers.2 layer 2 @0:7:5+9
          %14 = cut %12 : f32[batch/mb, hidden] holds %29 {d0:mb}  // backward layers.2 layer 2 @0:5:3+13
          %15 = send %14 hops 1 channel 3 : f32[batch/mb, hidden]  // backward layers.2 layer 2 @0:5:3+13 because "crosses from stage to stage" avoided by one_rank pp
        backward:
          %16 = recv hops 1 channel 1 : f32[batch/mb, hidden] holds %32 {d0:mb}  // backward layers.1 layer 1 @0:5:3+13 because "crosses from stage to stage" avoided by one_rank pp
          %17 = input 0 : f32[batch/mb, hidden] holds %0 {d0:mb}  // forward @0:3:3+28
          %18 = cut %17 : f32[batch/mb, hidden] holds %1 {d0:mb}  // forward layers.0 layer 0 @0:5:3+13
          %19 = dot %16, %18 over [batch/mb] : f32[hidden] accumulate holds %33 {sum(mb)}  // backward layers.0 layer 0 @0:7:5+9
        reduce:
          %20 = const 0.0 : f32[]  // update @0:9:3+16
          %21 = all_reduce.sum %20 over none stages [0, 1] : f32[] holds %38 {}  // update @0:9:3+16 because "sums what several stages have, for those that need it" avoided by one_stage
          %22 = mul %19, %19 : f32[hidden] holds %39 {}  // update layers.0.w layer 0
          %23 = reduce_sum %22 over [hidden] : f32[] holds %40 {}  // update layers.0.w layer 0
          %24 = mul %13, %13 : f32[hidden] holds %43 {}  // update layers.2.w layer 2
          %25 = reduce_sum %24 over [hidden] : f32[] holds %44 {}  // update layers.2.w layer 2
          %26 = add %23, %25 : f32[] holds %47 {}  // update
          %27 = all_reduce.sum %26 over none stages [0, 1] : f32[] holds %47 {}  // update because "sums what several stages have, for those that need it" avoided by one_stage
          %28 = sqrt %27 : f32[] holds %48 {}  // update
        update:
          %29 = param 0 : f32[hidden] holds %2 {}  // forward layers.0 layer 0 @0:6:5+21
          %30 = scalar learning_rate : f32[] holds %49 {}  // update
          %31 = mul %19, %30 : f32[hidden] holds %50 {}  // update layers.0.w layer 0 @0:6:11+1
          %32 = neg %31 : f32[hidden] holds %51 {}  // update layers.0.w layer 0 @0:6:11+1
          %33 = add %29, %32 : f32[hidden] holds %52 {}  // update layers.0.w layer 0 @0:6:11+1
          %34 = param 1 : f32[hidden] holds %8 {}  // forward layers.2 layer 2 @0:6:5+21
          %35 = mul %13, %30 : f32[hidden] holds %56 {}  // update layers.2.w layer 2 @0:6:11+1
          %36 = neg %35 : f32[hidden] holds %57 {}  // update layers.2.w layer 2 @0:6:11+1
          %37 = add %34, %36 : f32[hidden] holds %58 {}  // update layers.2.w layer 2 @0:6:11+1
        report 0 = %21
        report 1 = %28
        update 0 to %33 states []
        update 1 to %37 states []
    "#]].assert_eq(&print_local(&c.locals[0]));
    expect![[r#"
        # takes 15, with a bubble of 25.0 % of the work, where a forward pass takes 1, a backward pass 2
        # stage 0: 4 forward passes before the first backward pass, 2.0 microbatches in flight, idle for 3 of 15
        # stage 1: 3 forward passes before the first backward pass, 1.3 microbatches in flight, idle for 0 of 12
        0: F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1
        1: F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1
    "#]]
    .assert_eq(&timeline(&c.job, UNIT).text(&c.order));
}
