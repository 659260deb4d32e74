//! Artifacts of others, weights that say what they are of, and what is given in the place of something else.

use crate::mcc::Dir;
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// The pair of RFC 8410 (10.1, 10.3), which everybody knows, and the public key of RFC 8032 (7.1, test 1).
const SECRET: &str = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n";
const PUBLIC: &str = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n";
const OTHER: &str = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\n-----END PUBLIC KEY-----\n";

const GPT2: &str = "compile {models}/gpt2.mdl --tp 2 -D vocab=256 -D hidden=16 -D heads=2 -D layers=2 -D seq=8";

fn trained() -> Dir {
    let dir = Dir::new();
    for (name, text) in [("secret.pem", SECRET), ("public.pem", PUBLIC), ("other.pem", OTHER)] {
        dir.write(name, text);
    }
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(10));
    dir.line(&format!("{GPT2} --sign secret.pem -o out.mcc")).fails_with(&["`secret.pem` has mode 6", "chmod 600 secret.pem"]);
    fs::set_permissions(dir.path("secret.pem"), fs::Permissions::from_mode(0o600)).expect("changed");
    dir.line(&format!("{GPT2} --sign secret.pem -o out.mcc")).succeeds();
    dir.line("run out.mcc --trust other.pem --trust public.pem --data text.txt --steps 1 --save-weights w.safetensors").succeeds();
    dir
}

#[test]
fn an_artifact_is_run_if_a_trusted_key_has_signed_it_and_weights_say_what_they_are_of() {
    let dir = trained();
    let run = |flags: &str| dir.line(&format!("run out.mcc --data text.txt --steps 1 {flags}"));
    run("--trust other.pem").fails_with(&["`out.mcc` is signed with a key that --trust does not name; nothing of it was used"]);
    run("--trust secret.pem").fails_with(&["has a secret key, but --trust wants the public key"]);
    run("--resume w.safetensors").fails_with(&["so no run can go on from it: `--init w.safetensors` starts a new one"]);
    // The weights record the settings of `-D` and the text.
    dir.line("export hf w.safetensors -o alone").succeeds();
    dir.line("export hf w.safetensors --model {models}/gpt2.mdl -o given").succeeds();
    for file in ["model.safetensors", "config.json"] {
        assert!(fs::read(dir.path("alone").join(file)).unwrap() == fs::read(dir.path("given").join(file)).unwrap(), "{file}");
    }
    dir.line("export hf w.safetensors -D layers=3 -o other").misuses_with(&["was saved with layers = 2, `-D layers=3` says otherwise: leave it out"]);
    // This artifact has other settings and no signature.
    dir.line(&format!("{GPT2} -D layers=3 -o out.mcc")).succeeds();
    run("--trust public.pem").fails_with(&["is not signed, and --trust takes what is signed alone"]);
    run("--init w.safetensors").fails_with(&["is missing", "more", "with other settings: layers = 2 (here 3)"]);
    dir.line(&format!("{GPT2} --sign public.pem -o out.mcc")).fails_with(&["has a public key, but --sign wants the secret key"]);
}
