//! What a rank keeps: activation bytes per layer, counted from programs.

use crate::harness::compiled;
use crate::models::{GPT2, case};
use ir::program::Arena;

/// Bytes of one stash slot of the first stage, per layer: of four layers more, less what is outside of layers.
fn stash(defines: &[(&str, &str)], words: &str) -> u64 {
    let bytes = |layers: &str| {
        let defines: Vec<(&str, &str)> = GPT2.1.iter().chain(defines).copied().filter(|d| d.0 != "layers").chain([("layers", layers)]).collect();
        compiled(GPT2.0, &defines, &case(words)).job.programs[0].arena_bytes[Arena::Stash as usize]
    };
    (bytes("8") - bytes("4")) / 4
}

const WIDE: &[(&str, &str)] = &[("hidden", "64"), ("heads", "4"), ("ffn", "256"), ("seq", "128")];
/// `seq * hidden` in f32.
const SBH: u64 = 4 * 128 * 64;

#[test]
fn recomputation_keeps_less_the_more_it_repeats() {
    let kept = ["m2", "m2 selective", "m2 block1", "m2 full1", "m2 full2", "m2 full4"].map(|words| stash(WIDE, words));
    assert!(kept[0] > kept[1] && kept[1] > kept[3], "{kept:?}");
}

/// SEMANTICS: full recomputation keeps one `[batch, seq, hidden]` per layer.
#[test]
fn full_recomputation_keeps_the_input_of_each_unit() {
    assert_eq!(stash(WIDE, "m2 full1"), SBH);
    assert_eq!(stash(WIDE, "m2 full4"), SBH / 4);
    assert_eq!(stash(WIDE, "tp2 sp m2 full1"), SBH / 2);
}

#[test]
fn selective_recomputation_drops_the_result_and_the_statistics_of_attention() {
    let (none, selective) = (stash(WIDE, "m2"), stash(WIDE, "m2 selective"));
    assert_eq!(none - selective, SBH + 4 * 128 * 4);
}

/// sbh (10 + 24/t) on tp: what is outside of the tp regions is whole on every rank; with sp everything is split.
#[test]
fn tensor_parallelism_splits_what_is_inside_of_its_regions_and_sp_the_rest() {
    let (one, tp2, tp4) = (stash(WIDE, "m2"), stash(WIDE, "tp2 m2"), stash(WIDE, "tp4 m2"));
    let (outside, inside) = (2 * tp2 - one, 2 * (one - tp2));
    assert_eq!(tp4, outside + inside / 4);
    assert!(outside > 0 && inside > outside);
    assert_eq!(stash(WIDE, "tp4 sp m2"), one / 4);
}
