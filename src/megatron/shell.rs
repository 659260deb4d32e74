//! What is known while a script is read: its variables, what it does not say, and what was met that cannot be
//! understood.

use super::launch::Launch;
use super::text::Text;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Most bytes that all expansions of a script may come to: variables that hold each other twice double with
/// every line.
const MOST_TEXT: usize = 16 << 20;
/// Most statements that are followed, loops and functions included.
const MOST_STATEMENTS: usize = 100_000;

/// Why a script is not followed to its end.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ScriptError {
    #[error("line {0}: more than 100 brackets, quotes, strings or functions are within each other")]
    Deep(usize),
    #[error("line {0}: the variables of the script come to more than 16 MiB")]
    Text(usize),
    #[error("line {0}: more than 100,000 statements, with those of loops")]
    Statements(usize),
}

impl ScriptError {
    /// The same on another line.
    pub fn at(self, line: usize) -> ScriptError {
        match self {
            ScriptError::Deep(_) => ScriptError::Deep(line),
            ScriptError::Text(_) => ScriptError::Text(line),
            ScriptError::Statements(_) => ScriptError::Statements(line),
        }
    }
}

/// Lines of a file that the script sources begin behind so many, and those of the next behind twice as many: no file
/// has as many.
const FILE: usize = 10_000_000;

#[derive(Clone, Debug)]
pub enum ShellValue {
    Text(Text),
    Array(Vec<Text>),
}

/// Where something comes from that the script does not say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// `$1`
    Argument(u32),
    Environment,
    /// `$(command)`, with its text.
    Command(String),
    /// Something of the model or of the data that the script leaves to another program.
    Needed(String),
}

#[derive(Clone, Debug)]
pub struct UnknownValue {
    /// The variable that has it in the script that is written.
    pub name: String,
    pub origin: Origin,
    pub line: usize,
}

/// A note about a line of the script.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LineNote {
    pub line: usize,
    pub text: String,
}

#[derive(Default)]
pub struct Shell {
    /// Values of variables that the user gave, which take precedence over the script.
    user_values: BTreeMap<String, String>,
    requested: BTreeSet<String>,
    variables: BTreeMap<String, ShellValue>,
    /// Arguments of the function that is being followed.
    pub arguments: Option<Vec<Text>>,
    pub unknowns: Vec<UnknownValue>,
    pub notes: Vec<LineNote>,
    /// Where the script is, if files beside it may be read.
    pub script: Option<PathBuf>,
    /// Files that were read besides, as the script names them.
    files: Vec<String>,
    pub launches: Vec<Launch>,
    /// Variables of the environment that the script sets.
    pub exported: Vec<(String, usize)>,
    /// `exit` was met.
    pub has_ended: bool,
    /// Index of each unknown, by what it stands for.
    unknown_index: BTreeMap<String, usize>,
    /// How many of a line's expansions are unknown.
    of_line: BTreeMap<usize, usize>,
    noted: BTreeSet<LineNote>,
    text: usize,
    statements: usize,
}

impl Shell {
    pub fn new(user_values: &[(String, String)]) -> Shell {
        Shell { user_values: user_values.iter().cloned().collect(), ..Shell::default() }
    }

    pub fn note(&mut self, line: usize, text: impl Into<String>) {
        let note = LineNote { line, text: text.into() };
        if self.noted.insert(note.clone()) {
            self.notes.push(note);
        }
    }

    /// The line at which another file begins. Its name is to stand in texts of the script that is written.
    pub fn begin_file(&mut self, name: &str) -> usize {
        self.files.push(name.chars().map(|c| if c.is_alphanumeric() || "._-/".contains(c) { c } else { '_' }).collect());
        self.files.len() * FILE + 1
    }

    /// `line 3`, `line 3 of env.sh`.
    pub fn place(&self, line: usize) -> String {
        match (line / FILE).checked_sub(1).and_then(|k| self.files.get(k)) {
            Some(file) => format!("line {} of {file}", line % FILE),
            None => format!("line {line}"),
        }
    }

    /// The same where it is not clear of which script: `line 3 of the script`.
    pub fn place_of_script(&self, line: usize) -> String {
        let place = self.place(line);
        if line < FILE { format!("{place} of the script") } else { place }
    }

    /// Counts a statement.
    pub fn step(&mut self, line: usize) -> Result<(), ScriptError> {
        self.statements += 1;
        if self.statements > MOST_STATEMENTS { Err(ScriptError::Statements(line)) } else { Ok(()) }
    }

    /// Counts bytes that an expansion makes.
    pub fn charge(&mut self, bytes: usize, line: usize) -> Result<(), ScriptError> {
        self.text += bytes;
        if self.text > MOST_TEXT { Err(ScriptError::Text(line)) } else { Ok(()) }
    }

    /// What a variable or an argument holds, if it is set.
    pub fn read(&mut self, name: &str) -> Option<ShellValue> {
        self.requested.insert(name.into());
        let argument = name.parse::<usize>().ok().and_then(|k| k.checked_sub(1));
        if let (Some(k), Some(arguments)) = (argument, &self.arguments) {
            return arguments.get(k).cloned().map(ShellValue::Text);
        }
        let script = || self.script.as_ref().map(|path| ShellValue::Text(Text::known(path.display().to_string(), 0)));
        match self.user_values.get(name) {
            Some(text) => Some(ShellValue::Text(Text::known(text.clone(), 0))),
            None if matches!(name, "0" | "BASH_SOURCE") => script(),
            None => self.variables.get(name).cloned(),
        }
    }

    pub fn assign(&mut self, name: &str, value: ShellValue) {
        self.requested.insert(name.into());
        if let ShellValue::Text(text) = &value
            && let Some(which) = text.lone_unknown()
            && matches!(self.unknowns[which].origin, Origin::Argument(_) | Origin::Command(_))
            && ["ARGUMENT_", "OF_LINE_"].iter().any(|start| self.unknowns[which].name.starts_with(start))
            && !self.unknown_index.contains_key(name)
        {
            self.unknowns[which].name = name.into();
            // A text that is parsed again finds the unknown under this name.
            self.unknown_index.insert(name.into(), which);
        }
        self.variables.insert(name.into(), value);
    }

    pub fn unset(&mut self, name: &str) {
        self.variables.remove(name);
    }

    /// Arguments that the user gives, from the first on.
    pub fn arguments(&self) -> Vec<Text> {
        match &self.arguments {
            Some(arguments) => arguments.clone(),
            None => (1..).map_while(|k: u32| self.user_values.get(&k.to_string())).map(|a| Text::known(a.clone(), 0)).collect(),
        }
    }

    /// The unknown that a variable or an argument without a value is.
    pub fn missing(&mut self, name: &str, line: usize) -> Text {
        self.requested.insert(name.into());
        match name.parse::<u32>() {
            Ok(k) => self.unknown(name.into(), Origin::Argument(k), &format!("ARGUMENT_{k}"), line),
            Err(_) => self.unknown(name.into(), Origin::Environment, name, line),
        }
    }

    /// What a command prints that is not run.
    pub fn printed(&mut self, command: &str, line: usize) -> Text {
        let key = format!("{line} {command}");
        if let Some(which) = self.unknown_index.get(&key) {
            return Text::unknown(*which, line);
        }
        let others = self.of_line.entry(line).or_default();
        *others += 1;
        let (file, row) = (line / FILE, line % FILE);
        let place = if file == 0 { format!("OF_LINE_{row}") } else { format!("OF_LINE_{row}_OF_FILE_{file}") };
        let name = if *others == 1 { place } else { format!("{place}_{others}") };
        self.requested.insert(name.clone());
        match self.user_values.get(&name) {
            Some(text) => Text::known(text.clone(), line),
            None => self.unknown(key, Origin::Command(command.into()), &name, line),
        }
    }

    /// Something that is needed beside the script, under this name; the user may have given it.
    pub fn needed(&mut self, name: &str, what: &str, line: usize) -> Text {
        self.requested.insert(name.into());
        match self.user_values.get(name) {
            Some(text) => Text::known(text.clone(), line),
            None => self.unknown(name.into(), Origin::Needed(what.into()), name, line),
        }
    }

    fn unknown(&mut self, key: String, origin: Origin, name: &str, line: usize) -> Text {
        let which = *self.unknown_index.entry(key).or_insert_with(|| {
            self.unknowns.push(UnknownValue { name: name.into(), origin, line });
            self.unknowns.len() - 1
        });
        Text::unknown(which, line)
    }

    /// Values that the user gave and nothing asked for, with the nearest name that something did ask for.
    pub fn unused(&self) -> Vec<(&str, Option<&str>)> {
        let unasked = self.user_values.keys().filter(|name| !self.requested.contains(*name));
        unasked.map(|name| (name.as_str(), frontend::names::nearest(name, self.requested.iter().map(String::as_str)))).collect()
    }

    /// A text as the script that is written has it, without quotes: `${DATA_PATH}_text`.
    pub fn shown(&self, text: &Text) -> String {
        text.filled(|which| format!("${{{}}}", self.unknowns[which].name))
    }
}
