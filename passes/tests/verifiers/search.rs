//! Modules with something wrong at random: whatever the parser takes, no verifier panics.
//!
//! A module's text is changed in a token or a line. Of what still parses, all verifiers of its level look at it; each accepts
//! it, or refuses it by a number. `VERIFIER_MUTANTS=100000` tries so many, in place of as many as take a few seconds.

use crate::{folder, name};
use ir::module::Module;
use ir::text::{parse_module, print_module};
use passes::compile::{BugEvidence, holds};
use passes::table::{PASSES, verifiers};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs;
use std::panic::{set_hook, take_hook};
use verify::Invariant;

/// Numbers as SplitMix64 makes them (Steele, Lea & Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

/// Words, numbers, and single other characters; together the line again.
fn tokens(line: &str) -> Vec<&str> {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let mut out = vec![];
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        let end = if part(first) { rest.find(|c| !part(c)).unwrap_or(rest.len()) } else { first.len_utf8() };
        let (token, after) = rest.split_at(end);
        out.push(token);
        rest = after;
    }
    out
}

fn is_number(token: &str) -> bool {
    token.starts_with(|c: char| c.is_ascii_digit())
}

/// A change of a text: what its lines from one on are instead.
struct Change {
    at: usize,
    was: Vec<String>,
    is: Vec<String>,
}

fn change(lines: &[String], random: &mut Random) -> Change {
    let at = random.below(lines.len());
    let (line, end) = (&lines[at], |n: usize| (at + n).min(lines.len()));
    let of = |n: usize, is: Vec<String>| Change { at, was: lines[at..end(n)].to_vec(), is };
    match random.below(16) {
        0 => return of(1, vec![]),
        1 => return of(1, vec![line.clone(); 2]),
        2 => return of(2, lines[at..end(2)].iter().rev().cloned().collect()),
        3 => return of(1, vec![random.of(lines).clone()]),
        _ => {}
    }
    // The comment with a node's origin is not changed.
    let mut all = tokens(line.split("  //").next().unwrap_or_default());
    let after = line[all.iter().map(|t| t.len()).sum()..].to_owned();
    let meant: Vec<usize> = (0..all.len()).filter(|k| !all[*k].trim().is_empty()).collect();
    if meant.is_empty() {
        return of(1, vec![]);
    }
    let k = *random.of(&meant);
    let token = all[k];
    let near = &lines[at.saturating_sub(40)..end(40)];
    let number = token.parse::<u64>().unwrap_or(1);
    let numbers = [0, 1, 2, 3, number.wrapping_add(1), number.wrapping_sub(1), number.wrapping_mul(2), number / 2, 1 << 32, 1 << 62, u64::MAX];
    let made = random.of(&numbers).to_string();
    match random.below(8) {
        0 => {
            all.remove(k);
        }
        1 => all.insert(k, token),
        2 => {
            let other = *random.of(&meant);
            all.swap(k, other);
        }
        // This takes a token of the same kind from a line nearby.
        3 | 4 => {
            let others = tokens(random.of::<String>(near));
            let alike: Vec<&str> = others.into_iter().filter(|t| !t.trim().is_empty() && is_number(t) == is_number(token)).collect();
            if !alike.is_empty() {
                all[k] = *random.of(&alike);
            }
        }
        5 => {
            let from = *random.of(&meant);
            all.drain(k.min(from)..=k.max(from));
        }
        _ => {
            let numbers: Vec<usize> = meant.iter().copied().filter(|k| is_number(all[*k])).collect();
            if !numbers.is_empty() {
                all[*random.of(&numbers)] = &made;
            }
        }
    }
    of(1, vec![all.concat() + &after])
}

/// Sound modules at every level: those of the files, and what passes make of one.
fn sound() -> Vec<(String, Vec<String>)> {
    let paths = fs::read_dir(folder()).expect("the folder").map(|e| e.expect("an entry").path());
    let mut out: Vec<(String, String)> =
        paths.filter(|p| name(p).starts_with("base")).map(|p| (name(&p), fs::read_to_string(p).expect("UTF-8"))).collect();
    out.sort();
    let graph = out.iter().find(|m| m.0 == "base_graph").expect("a logical graph").1.clone();
    let mut module = parse_module(&graph).expect("a module");
    let options = module.options.clone();
    for pass in PASSES.iter().skip_while(|p| p.name != "zigzag").filter(|p| (p.wanted)(&options)) {
        assert_eq!((pass.run)(&mut module), Ok(vec![]), "{}", pass.name);
        out.push((format!("{} of base_graph", pass.name), print_module(&module)));
    }
    out.into_iter().map(|(name, text)| (name, text.lines().map(String::from).collect())).collect()
}

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    static PANICKED: RefCell<String> = const { RefCell::new(String::new()) };
}

/// What all verifiers say of a module; of a panic, where it was.
fn said(module: &Module) -> Vec<(&'static str, BugEvidence)> {
    WATCHED.set(true);
    let said = verifiers(module).filter_map(|v| holds(v, module).err().map(|e| (v.name, e))).collect();
    WATCHED.set(false);
    said
}

/// How many mutants came to something, and the change that is shortest to say.
#[derive(Default)]
struct SearchResult {
    count: usize,
    by: String,
}

impl SearchResult {
    fn add(&mut self, by: String) {
        self.count += 1;
        if self.by.is_empty() || by.len() < self.by.len() {
            self.by = by;
        }
    }
}

/// A number that the environment says.
fn told(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |n| n.parse().expect("a number"))
}

#[test]
fn verifiers_never_panic_on_what_parses() {
    let before = take_hook();
    set_hook(Box::new(move |info| match WATCHED.get() {
        true => PANICKED.set(info.location().map_or(String::new(), |l| format!("{}:{}", l.file(), l.line()))),
        false => before(info),
    }));
    let modules = sound();
    let (count, mut random) = (told("VERIFIER_MUTANTS", 1500), Random(told("VERIFIER_SEED", 1)));
    let mut parsed = 0;
    let (mut refused, mut panics) = (BTreeMap::<Invariant, SearchResult>::new(), BTreeMap::<String, SearchResult>::new());
    for _ in 0..count {
        let (name, lines) = random.of(&modules);
        let (mut text, mut by) = (lines.clone(), name.clone());
        for _ in 0..1 + random.below(4) / 3 {
            let Change { at, was, is } = change(&text, &mut random);
            text.splice(at..at + was.len(), is.iter().cloned());
            by += &format!("\n  line {}: {was:?}\n  is {is:?}", at + 1);
        }
        let text = text.join("\n") + "\n";
        let Ok(module) = parse_module(&text) else { continue };
        parsed += 1;
        if let Ok(path) = std::env::var("VERIFIER_LOG") {
            fs::write(path, &text).expect("log");
        }
        for (verifier, complaint) in said(&module) {
            let by = format!("{verifier}: {complaint}: {by}");
            match complaint.invariant() {
                Some(invariant) => refused.entry(invariant).or_default().add(by),
                None => panics.entry(PANICKED.take()).or_default().add(by),
            }
        }
    }
    println!("{parsed} of {count} parse");
    refused.iter().for_each(|(invariant, SearchResult { count, by })| println!("{invariant} {} refuses {count}, as by {by}", invariant.name()));
    panics.iter().for_each(|(place, SearchResult { count, by })| println!("PANIC at {place}: {count}, as by {by}"));
    assert!(panics.is_empty(), "{:?}", panics.keys());
}
