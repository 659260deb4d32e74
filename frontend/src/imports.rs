//! The files that a text imports, and those that they import.
//!
//! A path is relative to the file it stands in; a file that is reached in several ways is read once. What a file
//! imports is its own affair: who imports the file does not see it.

use crate::ast::{Ast, Function, Ident, StmtKind};
use crate::parse::parse_all;
use crate::{Loader, scope};
use ir::diag::{Diagnostic, Sources, Span};
use std::rc::Rc;

/// The longest chain of imported files, and the most files.
const MAX_DEPTH: usize = 64;
const MAX_FILES: usize = 1000;

/// All files beside the compiled one, each after those that it imports.
#[derive(Default)]
pub struct Imports {
    pub files: Vec<File>,
    /// The imports of the compiled file.
    pub links: Vec<Link>,
}

pub struct File {
    pub ast: Ast,
    pub links: Vec<Link>,
}

/// An `import` that could be followed.
#[derive(Clone)]
pub struct Link {
    /// Index in [`Imports::files`].
    pub file: usize,
    pub alias: Option<Ident>,
}

impl Imports {
    /// What a file can call beside its own functions.
    pub fn known(&self, links: &[Link], library: &[Ast]) -> scope::KnownNames {
        let open = links.iter().filter(|l| l.alias.is_none()).map(|l| &self.files[l.file].ast);
        let mut functions: Vec<Rc<str>> = open.chain(library).flat_map(functions).map(|f| f.name.name.clone()).collect();
        functions.extend(crate::elab::PRIMITIVES.iter().map(|n| (*n).into()));
        scope::KnownNames { functions, modules: links.iter().filter_map(|l| l.alias.as_ref().map(|a| a.name.clone())).collect() }
    }

    /// Files imported without `as` must not bring one name twice.
    pub fn clashes(&self, links: &[Link]) -> Vec<Diagnostic> {
        let mut seen: Vec<&Ident> = vec![];
        let mut out = vec![];
        let open = links.iter().filter(|l| l.alias.is_none()).map(|l| &self.files[l.file].ast);
        for name in open.flat_map(functions).map(|f| &f.name) {
            match seen.iter().find(|n| n.name == name.name && n.span.file != name.span.file) {
                Some(first) => {
                    let e = Diagnostic::error("E0412", format!("two imported files have a function `{}`", name.name)).label(name.span, "second");
                    out.push(e.label(first.span, "first").help("`import \"file.mdl\" as m;` brings a file's functions as `m.name`"));
                }
                None => seen.push(name),
            }
        }
        out
    }
}

/// The functions at the top of a file.
pub fn functions(ast: &Ast) -> impl Iterator<Item = &Function> {
    ast.items.iter().filter_map(|i| if let StmtKind::Fn(f) = &i.kind { Some(&**f) } else { None })
}

/// Reads all that `ast`, the file `name`, imports. The loader gets paths relative to that file.
pub fn read(sources: &mut Sources, name: &str, ast: &Ast, loader: Loader<'_>, errors: &mut Vec<Diagnostic>) -> Imports {
    let own = name.rsplit(['/', '\\']).next().unwrap_or(name).to_owned();
    let mut reader = Reader { sources, loader, errors, done: vec![], chain: vec![own], files: vec![] };
    let links = reader.links(ast);
    Imports { files: reader.files, links }
}

struct Reader<'a> {
    sources: &'a mut Sources,
    loader: Loader<'a>,
    errors: &'a mut Vec<Diagnostic>,
    /// Files by path. `None` could not be read.
    done: Vec<(String, Option<usize>)>,
    /// The files that are being read, each imported by the one before.
    chain: Vec<String>,
    files: Vec<File>,
}

impl Reader<'_> {
    fn links(&mut self, ast: &Ast) -> Vec<Link> {
        let mut out = vec![];
        for item in &ast.items {
            let StmtKind::Import { path, alias } = &item.kind else { continue };
            let importer = self.chain.last().map_or("", String::as_str);
            let key = resolve(importer, &path.text);
            out.extend(self.file(key, path.span).map(|file| Link { file, alias: alias.clone() }));
        }
        out
    }

    fn file(&mut self, key: String, span: Span) -> Option<usize> {
        if let Some(at) = self.chain.iter().position(|name| *name == key) {
            let circle: Vec<&str> = self.chain[at..].iter().chain([&key]).map(String::as_str).collect();
            let e = Diagnostic::error("E0412", format!("imports go in a circle: {}", circle.join(" -> "))).label(span, "closes the circle");
            self.errors.push(e.help("move what both files need into a third one, and import that from both"));
            return None;
        }
        if let Some((_, file)) = self.done.iter().find(|(name, _)| *name == key) {
            return *file;
        }
        let limit = match (self.chain.len() > MAX_DEPTH, self.done.len() >= MAX_FILES) {
            (true, _) => Some(format!("a chain of more than {MAX_DEPTH} imports")),
            (false, true) => Some(format!("more than {MAX_FILES} imported files")),
            (false, false) => None,
        };
        let text = match limit {
            Some(message) => {
                let e = Diagnostic::error("E0412", message).label(span, "stopped here");
                self.errors.push(e.help("join files: only what the model uses has to be imported"));
                None
            }
            None => (self.loader)(&key).map_err(|why| self.unread(&key, &why, span)).ok(),
        };
        let file = text.map(|text| {
            let (ast, mut found) = parse_all(self.sources, &key, &text);
            self.errors.append(&mut found);
            self.chain.push(key.clone());
            let links = self.links(&ast);
            self.chain.pop();
            self.files.push(File { ast, links });
            self.files.len() - 1
        });
        self.done.push((key, file));
        file
    }

    fn unread(&mut self, key: &str, why: &str, span: Span) {
        let e = Diagnostic::error("E0412", format!("cannot import \"{key}\": {why}")).label(span, "imported here");
        self.errors.push(e.help("the path is relative to the importing file"));
    }
}

/// A path that stands in a file, relative to what that file's own path is relative to; without `.` and `..` where
/// they can go.
fn resolve(importer: &str, path: &str) -> String {
    if path.starts_with('/') {
        return path.to_owned();
    }
    let directory = importer.rsplit_once('/').map(|(directory, _)| directory);
    let mut out: Vec<&str> = vec![];
    for part in directory.into_iter().flat_map(|d| d.split('/')).chain(path.split('/')) {
        match part {
            "." => {}
            ".." if out.last().is_some_and(|last| !last.is_empty() && *last != "..") => {
                out.pop();
            }
            part => out.push(part),
        }
    }
    out.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, compile};

    #[test]
    fn paths_are_relative_to_the_importing_file() {
        let cases = [
            ("model.mdl", "parts.mdl", "parts.mdl"),
            ("lib/a.mdl", "b.mdl", "lib/b.mdl"),
            ("lib/a.mdl", "../b.mdl", "b.mdl"),
            ("lib/a.mdl", "./sub/../b.mdl", "lib/b.mdl"),
            ("../lib/a.mdl", "../../b.mdl", "../../b.mdl"),
            ("/lib/a.mdl", "b.mdl", "/lib/b.mdl"),
            ("lib/a.mdl", "/b.mdl", "/b.mdl"),
        ];
        for (importer, path, want) in cases {
            assert_eq!(resolve(importer, path), want, "{path} in {importer}");
        }
    }

    /// Elaborates the first of some files, which import each other. Returns the errors' messages.
    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        let mut loader = |path: &str| {
            let found = files.iter().find(|(name, _)| *name == path);
            found.map(|(_, text)| (*text).to_owned()).ok_or_else(|| "there is no such file".to_owned())
        };
        let (name, text) = files[0];
        let result = compile(&mut Sources::default(), &format!("/models/{name}"), text, &Options::default(), &mut loader);
        result.map_or_else(|errors| errors.into_iter().map(|e| e.message).collect(), |_| vec![])
    }

    const MODEL: &str = "model m(batch) {\n  input x: f32[batch];\n  loss sum(a.one(x));\n}\n";

    #[test]
    fn imported_files_import_others_and_share_them() {
        let model = format!("import \"lib/a.mdl\" as a;\nimport \"c.mdl\" as c;\n{}", MODEL.replace("a.one(x)", "a.one(x) + c.two(x)"));
        let files = [
            ("m.mdl", model.as_str()),
            ("lib/a.mdl", "import \"b.mdl\";\nimport \"../c.mdl\" as c;\nfn one(x) = c.two(half(x));\n"),
            ("lib/b.mdl", "fn half(x) = x / 2;\n"),
            ("c.mdl", "fn two(x) = x * 2;\n"),
        ];
        assert_eq!(messages(&files), Vec::<String>::new());
    }

    #[test]
    fn what_a_file_imports_is_not_seen_by_who_imports_the_file() {
        for (import, call) in [("import \"a.mdl\";", "half(x)"), ("import \"a.mdl\" as a;", "a.half(x)")] {
            let model = format!("{import}\n{}", MODEL.replace("a.one(x)", call));
            let files = [("m.mdl", model.as_str()), ("a.mdl", "import \"b.mdl\";\nfn one(x) = half(x);\n"), ("b.mdl", "fn half(x) = x / 2;\n")];
            let name = call.trim_end_matches("(x)");
            assert_eq!(messages(&files), [format!("no function is called `{name}`")]);
        }
    }

    #[test]
    fn a_circle_of_imports_is_named() {
        let model = format!("import \"lib/a.mdl\" as a;\n{MODEL}");
        let a = "import \"b.mdl\";\nfn one(x) = half(x);\n";
        let files = |b| [("m.mdl", model.as_str()), ("lib/a.mdl", a), ("lib/b.mdl", b)];
        let inner = files("import \"../lib/a.mdl\" as back;\nfn half(x) = x / 2;\n");
        assert_eq!(messages(&inner), ["imports go in a circle: lib/a.mdl -> lib/b.mdl -> lib/a.mdl"]);
        let whole = files("import \"../m.mdl\" as back;\nfn half(x) = x / 2;\n");
        assert_eq!(messages(&whole), ["imports go in a circle: m.mdl -> lib/a.mdl -> lib/b.mdl -> m.mdl"]);
    }

    #[test]
    fn a_chain_that_does_not_end_is_cut() {
        let mut loader = |path: &str| Ok(format!("import \"x{path}\" as next;\nfn one(x) = x;\n"));
        let model = format!("import \"a.mdl\" as a;\n{MODEL}");
        let errors = compile(&mut Sources::default(), "m.mdl", &model, &Options::default(), &mut loader).map(|_| ()).unwrap_err();
        assert_eq!(errors[0].message, "a chain of more than 64 imports");
    }
}
