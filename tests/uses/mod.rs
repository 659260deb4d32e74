//! Which file of a crate uses which: edges are `use` paths, to the file that defines what they name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::{Attribute, Item, UseTree};

/// The files of a crate, and for each the files that it uses, both below `src`.
pub struct Files {
    pub uses: BTreeMap<PathBuf, BTreeSet<PathBuf>>,
}

/// A module: its file, the names that are re-exported in it with where they come from, and what its file uses.
#[derive(Default)]
struct Module {
    file: PathBuf,
    exports: BTreeMap<String, Vec<String>>,
    uses: Vec<Vec<String>>,
}

/// Whether an item is for tests alone.
fn for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|a| a.path().is_ident("cfg") && a.parse_args::<syn::Ident>().is_ok_and(|i| i == "test"))
}

/// All paths of a tree of `use`, each with the name by which it goes.
fn paths(tree: &UseTree, before: &[String], out: &mut Vec<(String, Vec<String>)>) {
    let with = |name: String| before.iter().cloned().chain([name]).collect::<Vec<_>>();
    match tree {
        UseTree::Path(p) => paths(&p.tree, &with(p.ident.to_string()), out),
        UseTree::Name(n) => out.push((n.ident.to_string(), with(n.ident.to_string()))),
        UseTree::Rename(n) => out.push((n.rename.to_string(), with(n.ident.to_string()))),
        UseTree::Glob(_) => out.push(("*".into(), with("*".into()))),
        UseTree::Group(g) => g.items.iter().for_each(|t| paths(t, before, out)),
    }
}

/// Reads the module of a file and those that it declares. `at` is the module's path.
fn read(file: &Path, at: Vec<String>, all: &mut BTreeMap<Vec<String>, Module>) {
    let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let mut module = Module { file: file.into(), ..Module::default() };
    let stem = file.file_stem().expect("a file has a name");
    let folder = file.parent().expect("a file has a folder");
    let folder = if ["lib", "main", "mod"].iter().any(|n| stem == *n) { folder.into() } else { folder.join(stem) };
    for item in parsed.items {
        match item {
            Item::Mod(m) if m.content.is_none() && !for_tests(&m.attrs) => {
                let name = m.ident.to_string();
                let files = [folder.join(format!("{name}.rs")), folder.join(&name).join("mod.rs")];
                if let Some(file) = files.iter().find(|f| f.exists()) {
                    read(file, at.iter().cloned().chain([name]).collect(), all);
                }
            }
            Item::Use(u) if !for_tests(&u.attrs) => {
                let mut found = vec![];
                paths(&u.tree, &[], &mut found);
                let exported = !matches!(u.vis, syn::Visibility::Inherited);
                for (name, path) in found {
                    if exported {
                        module.exports.insert(name, path);
                    } else {
                        module.uses.push(path);
                    }
                }
            }
            _ => {}
        }
    }
    all.insert(at, module);
}

/// The file that defines what a path names, seen from a module; none if that is of another crate.
fn defined<'a>(all: &'a BTreeMap<Vec<String>, Module>, from: &[String], path: &[String], depth: usize) -> Option<&'a Path> {
    let mut at = match path.first()?.as_str() {
        "crate" => vec![],
        "self" => from.to_vec(),
        "super" => from[..from.len().checked_sub(1)?].to_vec(),
        first => {
            let child: Vec<String> = from.iter().cloned().chain([first.to_string()]).collect();
            if !all.contains_key(&child) {
                return None;
            }
            child
        }
    };
    for (k, name) in path.iter().enumerate().skip(1) {
        if name == "super" {
            at.pop();
            continue;
        }
        let child: Vec<String> = at.iter().cloned().chain([name.clone()]).collect();
        if all.contains_key(&child) {
            at = child;
        } else {
            // A `pub use` of a parent is no definition.
            let export = all.get(&at)?.exports.get(name).filter(|_| depth < 8);
            let whole = export.map(|e| e.iter().cloned().chain(path[k + 1..].iter().cloned()).collect::<Vec<_>>());
            return whole.and_then(|p| defined(all, &at, &p, depth + 1)).or(Some(&all[&at].file));
        }
    }
    Some(&all.get(&at)?.file)
}

impl Files {
    /// Of the crate whose root is this file.
    pub fn of(root: &Path) -> Files {
        let mut all = BTreeMap::new();
        read(root, vec![], &mut all);
        let src = root.parent().expect("a file has a folder");
        let short = |p: &Path| p.strip_prefix(src).expect("below src").to_path_buf();
        let of = |(at, m): (&Vec<String>, &Module)| {
            let used = m.uses.iter().filter_map(|p| defined(&all, at, p, 0)).filter(|f| *f != m.file).map(short).collect();
            (short(&m.file), used)
        };
        Files { uses: all.iter().map(of).collect() }
    }

    /// The groups of files each of which uses all others of it, directly or not, largest first.
    pub fn circles(&self) -> Vec<Vec<PathBuf>> {
        let reach = |from: &PathBuf| {
            let (mut seen, mut open) = (BTreeSet::new(), vec![from.clone()]);
            while let Some(f) = open.pop() {
                open.extend(self.uses.get(&f).into_iter().flatten().filter(|g| seen.insert((*g).clone())).cloned());
            }
            seen
        };
        let all: BTreeMap<&PathBuf, BTreeSet<PathBuf>> = self.uses.keys().map(|f| (f, reach(f))).collect();
        let mut out: Vec<Vec<PathBuf>> = vec![];
        for (f, reached) in &all {
            if reached.contains(*f) && !out.iter().any(|c| c.contains(f)) {
                out.push(reached.iter().filter(|g| all[g].contains(*f)).cloned().collect());
            }
        }
        out.sort_by_key(|c| std::cmp::Reverse(c.len()));
        out
    }
}
