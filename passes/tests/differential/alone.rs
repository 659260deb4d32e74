//! Passes run alone, each on the text that the one before left: what `mcc opt` does.

use crate::harness::{Case, models, options};
use crate::models::{BERT, DEEPSEEK, GPT2, LLAMA, MIXTRAL, case};
use crate::random::number;
use frontend::Models;
use ir::module::Module;
use ir::progress::Progress;
use ir::text::{parse_module, print_module};
use passes::compile::{Compile, run};
use passes::table::{PASSES, verifiers};

fn read(text: &str) -> Module {
    parse_module(text).unwrap_or_else(|e| panic!("{e}"))
}

/// Every pass of a compile on the text of its module: the text of what comes out is that of the compile, and it holds up to all verifiers.
/// How many passes there were.
fn chain(text: &str, defines: &[(&str, &str)], of: &Case) -> usize {
    let Models { training, evaluation, .. } = models(text, defines, of).expect("a model");
    let progress = Progress::default();
    let mut compile = Compile::new(training, evaluation, &options(of), &progress).unwrap_or_else(|e| panic!("{of:?}: {e:?}"));
    let mut before = print_module(compile.module());
    assert_eq!(&read(&before), compile.module());
    let mut count = 0;
    loop {
        let Some(pass) = compile.step().unwrap_or_else(|e| panic!("{of:?}: {e:?}")) else { return count };
        let mut alone = read(&before);
        run(&mut alone, pass, &mut vec![], &progress).unwrap_or_else(|e| panic!("{e}"));
        assert!(alone == *compile.module(), "`{}` alone is another pass", pass.name);
        assert_eq!(alone.level(), pass.levels.1);
        for verifier in verifiers(&alone) {
            (verifier.run)(&alone).unwrap_or_else(|e| panic!("after `{}`, `{}`: {e}", pass.name, verifier.name));
        }
        before = print_module(&alone);
        assert!(read(&before) == alone, "the text after `{}` does not read back", pass.name);
        count += 1;
    }
}

#[test]
fn every_pass_does_alone_what_it_does_in_a_compile() {
    let cases = [
        (DEEPSEEK, "cp2 tp2 ep2 etp1 both"),
        (GPT2, "tp2 pp2 m4 zero1"),
        (GPT2, "dp2 m2 zero3 offload"),
        (GPT2, "dp2 pp2 zbh m4"),
        (LLAMA, "cp2 tp2 sp m2 chunks2 tf32"),
        (BERT, "dp2 tp2 zero2 full1"),
        (LLAMA, "dp2 pp2 zbv m4 bf16 selective segments4"),
        (MIXTRAL, "dp2 ep2 b2"),
    ];
    // One in two; with `MUTANTS` (`make test-long-mutants`) all.
    let one_in = if number("MUTANTS", 0) > 0 { 1 } else { 2 };
    for (model, words) in cases.into_iter().step_by(one_in) {
        assert!(chain(model.0, model.1, &case(words)) > 15, "{words}");
    }
}

#[test]
fn names_of_passes_are_unique_and_levels_follow_each_other() {
    for (k, pass) in PASSES.iter().enumerate() {
        assert!(PASSES[..k].iter().all(|p| p.name != pass.name), "{}", pass.name);
        assert!(k == 0 || PASSES[k - 1].levels.1 == pass.levels.0, "{}", pass.name);
    }
}
