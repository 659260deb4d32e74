//! `mcc data`.

use crate::cli::{Data as Command, DataInspectArgs, TokenizeArgs, TrainTokenizerArgs};
use crate::failure::Failure;
use crate::misuse::misuse;
use crate::print::{note, out, report};
use crate::shown::escapes;
use crate::signals;
use crate::tokenizer::{self, TokenizerFiles, beside};
use anyhow::Context;
use data::indexed::Indexed;
use data::inspect::{InspectDepth, document, inspect as look};
use data::mask::{Mask, is_beside};
use data::text::{self, Begin, Chat, Existing, Fields, Outcome, Progress, Recipe, Special, TextError, TokenizeRequest, Tokenizer};
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::sync::Arc;

pub fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Tokenize(args) => tokenize(args),
        Command::Inspect(args) => inspect(args),
        Command::TrainTokenizer(args) => train(args),
    }
}

fn tokenize(args: &TokenizeArgs) -> Result<(), Failure> {
    let tokenizer = Tokenizer::open(&args.tokenizer)?;
    let end = args.append_eod.then(|| tokenizer.end(args.eod_token.as_deref())).transpose()?;
    if let Some(end) = end.filter(|_| args.eod_token.is_none() && tokenizer.configured().is_none()) {
        let name = tokenizer.decode(&[end]).map_err(anyhow::Error::msg)?;
        note!("documents end with `{name}`, token {end}: no tokenizer_config.json says which, and --eod-token can");
    }
    let (existing, begin) = if args.force { (Existing::Replaced, Begin::Anew) } else { (Existing::Refused, Begin::Resume) };
    let usual = match (&args.prompt_field, args.chat) {
        (_, true) => "messages",
        (Some(_), false) => "completion",
        (None, false) => "text",
    };
    let chat = args.chat.then(|| Chat::open(tokenizer.file(), args.chat_template.as_deref())).transpose()?.map(Arc::new);
    let fields = Fields { text: args.field.clone().unwrap_or_else(|| usual.into()), prompt: args.prompt_field.clone(), chat };
    if let Some(there) = text::written(&args.output, &fields).into_iter().find(|f| !args.force && f.exists()) {
        return Err(misuse!("`{}` is there already: --force replaces it, or name another prefix", there.display()).into());
    }
    // A different tokenizer that is kept there would be lost.
    let (own, kept) = (beside(&args.output), TokenizerFiles::of_file(tokenizer.file()));
    if let Some(there) = TokenizerFiles::within(&own).filter(|there| !args.force && kept.differs(there)) {
        return Err(misuse!("`{}` has another tokenizer: --force replaces it, or name another prefix", there.dir().display()).into());
    }
    let request = TokenizeRequest {
        inputs: args.text.inputs.clone(),
        tokenizer: &tokenizer,
        fields,
        end,
        special: if args.add_special_tokens { Special::Added } else { Special::LeftOut },
        dtype: None,
        prefix: args.output.clone(),
        existing,
        begin,
    };
    let bar = bar();
    let outcome = signals::tidily(|came| {
        let outcome = text::tokenize(&request, |progress| {
            advance(&bar, progress);
            if came() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        bar.finish_and_clear();
        if let Ok(Outcome::Stopped(at)) = &outcome {
            note!("stopped after {} documents: the same command goes on from there", HumanCount(at.documents));
        }
        outcome
    })?;
    let outcome = outcome.map_err(|e| match e {
        TextError::Other { .. } => misuse!("{e}: repeat that job, or --force begins anew"),
        e => e.into(),
    })?;
    let Outcome::Done(done) = outcome else { return Err(Failure::Reported) };
    kept.put(&own).with_context(|| format!("cannot keep the tokenizer in `{}`", own.display()))?;
    let prefix = args.output.display();
    let resumed = if done.resumed > 0 { format!(", {} of them by an earlier command", HumanCount(done.resumed)) } else { String::new() };
    report!(
        "{prefix}.bin, {prefix}.idx: {} documents{resumed}, {} tokens of {}\n",
        HumanCount(done.documents),
        HumanCount(done.tokens),
        done.dtype.name()
    );
    if let Some(counted) = done.counted {
        report!("{prefix}.mask.bin, {prefix}.mask.idx: {} of these tokens are answers\n", HumanCount(counted));
    }
    Ok(())
}

/// A bar on a terminal, and nothing elsewhere.
fn bar() -> ProgressBar {
    if !(std::io::stderr().is_terminal() && escapes()) {
        return ProgressBar::hidden();
    }
    let template = "{bar:24} {bytes}/{total_bytes}  {msg}  {bytes_per_sec}  {eta} left";
    let style = ProgressStyle::with_template(template).expect("invariant: the template is right");
    ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_style(style)
}

fn advance(bar: &ProgressBar, progress: &Progress) {
    let begins = bar.length().is_none();
    bar.set_length(progress.of);
    bar.set_position(progress.bytes);
    if begins {
        // The bytes that an earlier command read say nothing about the pace of this one.
        bar.reset_eta();
    }
    bar.set_message(format!("{} tokens", HumanCount(progress.tokens)));
}

fn inspect(args: &DataInspectArgs) -> Result<(), Failure> {
    let set = Indexed::open(&args.prefix)?;
    let contents = look(&set, if args.quick { InspectDepth::Index } else { InspectDepth::Tokens })?;
    if args.document >= contents.documents && (args.document > 0 || args.tokenizer.is_some()) {
        return Err(misuse!("there is no document {}: `{}` has {}, counted from 0", args.document, set.prefix().display(), contents.documents).into());
    }
    let mask = is_beside(set.prefix()).then(|| Mask::open(&set)).transpose()?;
    let counted = mask.filter(|_| !args.quick).map(|mask| mask.counted()).transpose()?;
    let tokens = document(&set, args.document, args.tokens)?;
    // The default is the tokenizer that made the data set.
    let own = beside(set.prefix()).join(tokenizer::FILES[0]);
    let tokenizer = args.tokenizer.as_deref().or_else(|| own.is_file().then_some(&own)).map(Tokenizer::open).transpose()?;
    let text = tokenizer.as_ref().map(|t| t.decode(&tokens)).transpose().map_err(anyhow::Error::msg)?;
    if let (Some(most), Some(tokenizer)) = (contents.largest_token, &tokenizer)
        && u64::from(most) >= tokenizer.tokens()
    {
        note!("warning: token {most} is none of this tokenizer's {}: the data set was made by another", HumanCount(tokenizer.tokens()));
    }
    if args.json {
        out!(
            "{}\n",
            json!({"prefix": set.prefix().display().to_string(), "dtype": contents.dtype.name(), "documents": contents.documents,
                   "sequences": contents.sequences, "tokens": contents.tokens, "empty": contents.empty, "shortest": contents.shortest,
                   "median": contents.median, "longest": contents.longest, "largest_token": contents.largest_token, "counted": counted,
                   "document": {"number": args.document, "tokens": tokens, "text": text}})
        )?;
        return Ok(());
    }
    let bytes = contents.tokens * contents.dtype.size();
    let row = |name: &str, what: String| out!("{name:<14}{what}\n");
    row("documents", HumanCount(contents.documents).to_string() + &empty(contents.empty))?;
    if contents.sequences != contents.documents - contents.empty {
        row("sequences", HumanCount(contents.sequences).to_string())?;
    }
    row("tokens", format!("{} of {}, {}", HumanCount(contents.tokens), contents.dtype.name(), HumanBytes(bytes)))?;
    let [shortest, median, longest] = [contents.shortest, contents.median, contents.longest].map(HumanCount);
    row("lengths", format!("{shortest} to {longest} tokens, half of them up to {median}"))?;
    if let Some(counted) = counted {
        row("loss mask", format!("{} of these tokens count", HumanCount(counted)))?;
    }
    if let Some(most) = contents.largest_token {
        row("largest token", most.to_string())?;
    }
    let shown = text.map_or_else(|| tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" "), |text| format!("{text:?}"));
    row(&format!("document {}", args.document), shown)?;
    Ok(())
}

fn empty(documents: u64) -> String {
    if documents == 0 { String::new() } else { format!(", {} of them empty", HumanCount(documents)) }
}

fn train(args: &TrainTokenizerArgs) -> Result<(), Failure> {
    let file = args.output.join("tokenizer.json");
    let config = file.with_file_name("tokenizer_config.json");
    if let Some(there) = [&file, &config].into_iter().find(|f| !args.force && f.exists()) {
        return Err(misuse!("`{}` is there already: --force replaces it, or name another directory", there.display()).into());
    }
    let recipe =
        Recipe { inputs: args.text.inputs.clone(), field: args.field.clone(), tokens: args.tokens as usize, special: args.special_token.clone() };
    let tokenizer = text::train(&recipe, &file)?;
    let fewer = if tokenizer.tokens() < u64::from(args.tokens) { ": the texts have no more that stands together twice" } else { "" };
    report!("{}: {} tokens{fewer}\n", file.display(), HumanCount(tokenizer.tokens()));
    Ok(())
}
