use super::*;

/// A chat template of a tokenizer with the tokens `<s>` and `</s>`.
fn chat(template: &str) -> Chat {
    let folder = tempfile::tempdir().expect("a folder");
    let config = serde_json::json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template});
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).expect("written");
    Chat::open(&folder.path().join("tokenizer.json"), None).expect("a template")
}

/// The text of a line, with `[` and `]` around what assistants say.
fn said(template: &str, line: &str) -> String {
    let RenderedChat { text, learnt } = match chat(template).line(line.as_bytes(), "messages") {
        Ok(said) => said,
        Err((column, what)) => return format!("{column:?} {what}"),
    };
    let mut out = text;
    for range in learnt.iter().rev() {
        out.insert(range.end, ']');
        out.insert(range.start, '[');
    }
    out
}

const LINE: &str = r#"{"id": 3, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hé? "},
 {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}],
 "tools": [{"name": "é<b>", "arguments": {"z": 1, "a": [true, null]}}]}"#;

/// Jinja2 with transformers' settings writes the same texts.
#[test]
fn messages_become_the_text_that_transformers_makes() {
    let of_tags = "{%- for m in messages %}\n    {{- '<|' + m['role'] + '|>\\n' }}\n    {{- m.content.strip() + eos_token + '\\n' }}\n{%- endfor %}\n\
                   {%- if add_generation_prompt %}\n    {{- '<|assistant|>\\n' }}\n{%- endif %}\n";
    let text = "<|system|>\nBe brief.</s>\n<|user|>\nHé?</s>\n<|assistant|>\n[Yes.</s>\n]<|user|>\nWhy?</s>\n<|assistant|>\n[So.</s>\n]";
    assert_eq!(said(of_tags, LINE), text);
    let of_brackets = "{% set ns = namespace(system='') %}\n{% if messages[0].role == 'system' %}\n  {% set ns.system = messages[0].content %}\n\
                       \x20 {% set messages = messages[1:] %}\n{% endif %}\n{{ bos_token }}\n{% for m in messages %}\n\
                       {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\n\
                       {% if m.role == 'user' %}\n[INST] {% if loop.first and ns.system %}{{ ns.system }} {% endif %}{{ m.content|trim }} [/INST]\
                       {% else %} {{ m.content }}{{ eos_token }}{% endif %}\n{% endfor %}";
    assert_eq!(said(of_brackets, LINE), "<s>\n[INST] Be brief. Hé? [/INST][ Yes.</s>][INST] Why? [/INST][ So.</s>]");
    assert_eq!(
        said(of_brackets, r#"{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}"#),
        "None the chat template: line 8: roles must alternate"
    );
    assert_eq!(
        said("{{ tools | tojson }}|{{ tools[0] | tojson(indent=2) }}", LINE),
        "[{\"name\": \"é<b>\", \"arguments\": {\"z\": 1, \"a\": [true, null]}}]|{\n  \"name\": \"é<b>\",\n  \"arguments\": {\n    \"z\": 1,\n    \
         \"a\": [\n      true,\n      null\n    ]\n  }\n}[][]"
    );
}

#[test]
fn what_a_template_marks_as_generated_is_what_assistants_say() {
    let thinks = |marked: bool| {
        let [begin, end] = if marked { ["{%- generation -%}", "{%- endgeneration %}"] } else { [""; 2] };
        format!(
            "{{% for m in messages %}}<{{{{ m.role }}}}>{{% if m.role == 'assistant' %}} {begin} {{% if loop.last %}}(thinks) {{% endif %}}{{{{ m.content }}}}|\
             {end}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<assistant>{{% endif %}}"
        )
    };
    assert_eq!(said(&thinks(true), LINE), "<system>Be brief.<user> Hé? <assistant>[Yes.|]<user>Why?<assistant>[(thinks) So.|]");
    // The template writes the first answer otherwise when it is the last message, so without marks nobody can tell
    // where it stands.
    assert!(said(&thinks(false), LINE).contains("message 2, counted from 0: where it begins or ends"));
    let odd = LINE.replace("Yes.", "\\udbff\\udfff");
    assert_eq!(said(&thinks(true), &odd), "None a message has U+10FFFF, which no text has");
}

#[test]
fn lines_and_templates_that_are_none_are_refused() {
    let plain = "{{ messages[0].content }}";
    let list = "each line is a JSON object whose field `messages` is a list of messages";
    assert!(said(plain, "{\"messages\": [").ends_with(list));
    for line in ["{\"text\": \"a\"}", "{\"messages\": \"a\"}", "3"] {
        assert_eq!(said(plain, line), "None it has no list of messages `messages`: name the field that has it");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let tokenizer = folder.path().join("tokenizer.json");
    let refused = |own: Option<&Path>| {
        Chat::open(&tokenizer, own).err().map(|e| e.to_string().replace(&format!("{}/", folder.path().display()), "")).unwrap_or_default()
    };
    assert!(refused(None).starts_with("`tokenizer_config.json`: it has no chat template"));
    fs::write(folder.path().join("chat_template.jinja"), "a\n{% if %}").expect("written");
    assert!(refused(None).starts_with("`chat_template.jinja`: line 2: "), "{}", refused(None));
    assert!(refused(Some(Path::new("/none"))).starts_with("`/none`: "));
}
