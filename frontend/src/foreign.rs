//! What readers bring along from Python, PyTorch and C, and how this language says it.

/// What the language writes instead, if a statement cannot be parsed because of another language's spelling at byte `at` of it.
pub fn spelling(statement: &str, at: usize) -> Option<&'static str> {
    let (before, rest) = (statement[..at].trim_end(), &statement[at..]);
    let starts = |words: &[&str]| words.iter().any(|w| rest.starts_with(w));
    let first = before.split(|c: char| !is_word(c)).find(|w| !w.is_empty()).unwrap_or("");
    let last = before.rsplit(|c: char| !is_word(c)).next().unwrap_or("");
    let in_call = enclosing(before) == Some(('(', true));
    let in_index = enclosing(before) == Some(('[', true));
    match () {
        () if in_call && ["dim", "axis", "dims"].iter().any(|w| word(rest) == *w || last == *w) => {
            Some("dims have names, and `over:` names those of a reduction: `softmax(x, over: keys)`")
        }
        () if in_call && starts(&["="]) && !starts(&["=="]) => {
            Some("an argument by name is written with `:`, as in `linear(x, hidden, ffn, bias: true)`")
        }
        () if in_index && starts(&[":"]) => Some("`slice(x, seq -> first, at: 0)` takes a part of a dim; `x[seq: 0]` is one element of it"),
        () if in_index => Some("an index says along which dim: `embed[vocab: tokens]`"),
        () if starts(&["+=", "-=", "*=", "/="]) => Some("write the name again: `x = x + 1;`"),
        () if starts(&["@"]) => Some("`dot(x, w, over: hidden)` is a product summed over a dim"),
        () if starts(&["*"]) && before.ends_with('*') => Some("a power is written `^`"),
        () if starts(&["&"]) => Some("write `and`"),
        () if starts(&["|"]) => Some("write `or`"),
        () if starts(&["!", "~"]) => Some("write `not`"),
        () if starts(&["'"]) => Some("a text stands between double quotes: `\"silu\"`"),
        () if word(rest) == "if" || starts(&["?"]) => {
            Some("`if` begins a statement, `if condition { .. }`; `where(condition, a, b)` chooses by element")
        }
        () if last == "lambda" => Some("a function has a name: `fn double(x: [..]) = x * 2;`"),
        () => keyword(first),
    }
}

/// What the language writes for a statement that begins with another language's keyword.
pub fn keyword(word: &str) -> Option<&'static str> {
    Some(match word {
        "for" => "`repeat i in layers { .. }` repeats a block; what is done to all elements of a dim needs no loop",
        "while" => "`repeat i in layers { .. }` repeats a block a fixed number of times; there is no other loop",
        "def" | "func" | "function" => "a function is `fn name(x: [..]) -> [..] { .. }`",
        "class" | "struct" => "a model is `model name(batch, ..) { .. }`; its parts are functions: `fn block(x: [..]) -> [..] { .. }`",
        "elif" => "write `else if condition { .. }`",
        "var" | "const" | "auto" => "a new name is `let x = ..;`",
        "from" | "include" | "using" => "`import \"file.mdl\" as m;` makes a file's functions known",
        _ => return None,
    })
}

/// What the language has for a function or a constant of PyTorch or NumPy.
pub fn name(name: &str) -> Option<&'static str> {
    Some(match name {
        "None" | "null" | "nil" => "write `none`",
        "True" => "write `true`",
        "False" => "write `false`",
        "matmul" | "mm" | "bmm" | "einsum" | "contract" | "addmm" | "inner" => {
            "`dot(a, b, over: d)` is a product summed over `d`, along other common dims"
        }
        "reshape" | "permute" | "transpose" | "flatten" | "squeeze" | "unsqueeze" | "rearrange" | "split" | "chunk" => {
            "`view(x, hidden -> [heads, head_dim])` splits, merges and renames dims, whose order never matters; `slice` takes a part"
        }
        "cat" | "concatenate" => "`concat(a, b, [d, e] -> f)` puts one after the other",
        "Linear" => "`linear(x, from, to)` has its parameters within",
        "Embedding" | "embedding" | "gather" | "take" | "index_select" => {
            "`table[vocab: tokens]` looks rows up, of a `param table: [vocab, hidden] ~ normal(0.02);`"
        }
        "masked_fill" => "`where(condition, a, b)` chooses by element",
        "detach" => "`stop_gradient(x)` is constant for differentiation",
        "arange" | "range" => "`index(d)` is 0, 1, 2, .. along a dim; `repeat i in layers { .. }` repeats a block",
        "broadcast_to" | "repeat_interleave" | "tile" => "`expand(x, dims)` is the same along new dims",
        "zeros" | "ones" | "full" | "zeros_like" | "ones_like" => "a number stands for a tensor of it: `x * 0`; `expand(0, dims)` gives it dims",
        "scaled_dot_product_attention" => "`attention(q, k, v, head_dim, keys, mask: causal(seq, keys))`",
        "clamp" | "clip" => "`maximum(minimum(x, most), least)`",
        "pow" => "a power is written `x ^ 2`",
        "float" | "to" | "cast" => "`f32(x)`, `real(x)` and `i32(x)` convert",
        "len" | "size" | "shape" => "a dim's name is its size: `hidden / 2`",
        "bf16" | "f16" | "half" | "bfloat16" => "`real(x)` converts to the precision that is compiled for, `f32(x)` to f32",
        "print" => "`metric name = mean(max(abs(x), over: [seq, hidden]));` is shown by `mcc run -v`",
        _ => return None,
    })
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn word(text: &str) -> &str {
    &text[..text.find(|c| !is_word(c)).unwrap_or(text.len())]
}

/// The bracket that is open at the end of a text, and whether it belongs to a value before it, as in `f(` and `x[`.
fn enclosing(text: &str) -> Option<(char, bool)> {
    let mut closed = 0;
    for (at, c) in text.char_indices().rev() {
        match c {
            ')' | ']' => closed += 1,
            '(' | '[' if closed > 0 => closed -= 1,
            '(' | '[' => return Some((c, text[..at].trim_end().ends_with(|c: char| is_word(c) || c == ']' || c == ')'))),
            _ => {}
        }
    }
    None
}
