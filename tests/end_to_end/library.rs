//! mcc as a library: the artifact that it makes is the command line's.

use crate::mcc::{Dir, models};
use mcc::{Error, Request, compile};
use std::fs;

#[test]
fn the_library_and_the_command_line_make_one_artifact() {
    let text = fs::read_to_string(models().join("mlp.mdl")).expect("a model");
    let mut request = Request::new("mlp.mdl", &text).expect("a CPU that kernels can be compiled for");
    request.elaboration.defines = vec![("features".into(), "8".into()), ("hidden".into(), "16".into())];
    request.options.tp = 2;
    let made = compile(&request, &mut |_| Err("it imports nothing".into()), &Default::default()).expect("an artifact");
    let dir = Dir::new();
    made.write(&dir.path("library.mcc")).expect("written");
    fs::copy(models().join("mlp.mdl"), dir.path("mlp.mdl")).expect("copied");
    dir.line("compile mlp.mdl -D features=8 -D hidden=16 --tp 2 -o line.mcc").succeeds();
    let [library, line] = ["library.mcc", "line.mcc"].map(|name| dir.line(&format!("dump {name}")).succeeds().stdout);
    assert_eq!(library, line);
    assert_eq!(fs::read(dir.path("library.mcc/kernels.so")).ok(), fs::read(dir.path("line.mcc/kernels.so")).ok());
}

#[test]
fn the_library_says_what_is_wrong_and_prints_nothing() {
    let nothing = |text: &str| {
        let request = Request::new("m.mdl", text).expect("a CPU that kernels can be compiled for");
        compile(&request, &mut |_| Err("it imports nothing".into()), &Default::default())
    };
    let error = nothing("model m(batch) {\n  input x: f32[batch];\n  loss mean(y);\n}\n").expect_err("no `y`");
    assert!(matches!(&error, Error::User(errors, _) if errors[0].code == "E0401"), "{error:?}");
    assert!(error.to_string().contains("m.mdl:3:13"), "{error}");
    let untrained = nothing("model m(batch) {\n  input x: f32[batch];\n  loss mean(x);\n}\n").expect_err("nothing to train");
    assert!(matches!(&untrained, Error::User(errors, _) if errors[0].code == "E0502"), "{untrained:?}");
    let mut request = Request::new("m.mdl", "model m(batch) {\n}\n").expect("a CPU that kernels can be compiled for");
    request.options.tf32 = true;
    let tf32 = compile(&request, &mut |_| Err("it imports nothing".into()), &Default::default()).expect_err("no tensor cores");
    assert!(matches!(&tf32, Error::User(errors, _) if errors[0].code == "E0642"), "{tf32:?}");
}
