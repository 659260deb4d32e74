use super::*;

const SYMBOLS: &[Symbol] = &[("a", "Class"), ("a", "function")];

fn read(bytes: &[u8]) -> Result<Pickle<'_>, PickleError> {
    Pickle::read(bytes, SYMBOLS)
}

fn says(bytes: &[u8]) -> String {
    read(bytes).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn what_is_written_is_read() {
    let mut w = Writer::new();
    w.object(SYMBOLS[0], |w| {
        w.dict(|w| {
            w.text("é");
            w.tuple(|w| {
                w.none();
                w.bool(true);
                w.call(SYMBOLS[1], |w| w.counts(&[]));
            });
            w.text("list");
            w.list(|w| [0, 255, 256, u64::from(u32::MAX), i64::MAX as u64].into_iter().for_each(|n| w.count(n)));
            w.text("outside");
            w.outside(|w| w.symbol(SYMBOLS[1]));
        });
    });
    let bytes = w.finish();
    let pickle = read(&bytes).unwrap();
    assert_eq!(pickle.made(pickle.root()), Some((SYMBOLS[0], &[][..])));
    let fields = pickle.entries(pickle.state(pickle.root()).unwrap()).unwrap();
    assert_eq!(fields.iter().map(|f| pickle.text(f.0).unwrap()).collect::<Vec<_>>(), ["é", "list", "outside"]);
    let [none, yes, made] = pickle.items(fields[0].1).unwrap() else { panic!("no three") };
    assert_eq!((pickle.node(*none), pickle.node(*yes)), (&Node::None, &Node::Bool(true)));
    assert_eq!((pickle.made(*made), pickle.state(*made)), (Some((SYMBOLS[1], &[][..])), None));
    let counts: Vec<_> = pickle.items(fields[1].1).unwrap().iter().map(|n| pickle.count(*n).unwrap()).collect();
    assert_eq!(counts, [0, 255, 256, u64::from(u32::MAX), i64::MAX as u64]);
    let Node::Outside(what) = pickle.node(fields[2].1) else { panic!("it is here") };
    assert_eq!(pickle.symbol(*what), Some(SYMBOLS[1]));
    // A pickle that is cut off anywhere is refused.
    for end in 0..bytes.len() {
        assert!(read(&bytes[..end]).is_err(), "{end}");
    }
}

#[test]
fn protocol_4_is_read() {
    // {"k": [a.Class(), 1.5, -2, 70000], ...} is written with STACK_GLOBAL, MEMOIZE, FRAME, APPEND and SETITEM.
    let bytes = b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01k\x94]\x94(\x8c\x01a\x94\x8c\x05Class\x94\x93\x94)\x81\x94G\x3f\xf8\x00\x00\x00\x00\x00\x00J\xfe\xff\xff\xff\x8a\x03\x70\x11\x01eh\x01as.rest";
    let pickle = read(bytes).unwrap();
    let [(key, list)] = pickle.entries(pickle.root()).unwrap() else { panic!("no one") };
    let [class, half, minus, long, text] = pickle.items(*list).unwrap() else { panic!("no five") };
    assert_eq!((pickle.text(*key), pickle.text(*text)), (Some("k"), Some("k")));
    assert_eq!(pickle.made(*class).unwrap().0, SYMBOLS[0]);
    assert_eq!([half, minus, long].map(|n| pickle.node(*n).clone()), [Node::Float(1.5), Node::Int(-2), Node::Int(70_000)]);
}

#[test]
fn nothing_is_executed_and_what_is_not_read_is_named() {
    let refused = "which is none of the names that are read here; nothing of it was executed";
    assert_eq!(says(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."), format!("byte 2: it names `os.system`, {refused}"));
    assert_eq!(says(b"\x80\x04\x8c\x05posix\x8c\x06system\x93."), format!("byte 17: it names `posix.system`, {refused}"));
    // The module `a.Class` with an empty name is not the class `a.Class`.
    assert_eq!(says(b"ca.Class\n\n."), format!("byte 0: it names `a.Class.`, {refused}"));
    assert!(says(&[b"c", &[b'x'; 1000][..], b"\ny\n"].concat()).len() < 200);
    for (bytes, name) in [
        (&b"(S'a'\n"[..], "STRING"),
        (b"(ia\nClass\n", "INST"),
        (b"(o", "OBJ"),
        (b"\x82\x01", "EXT1"),
        (b"I1\n", "INT"),
        (b"P1\n", "PERSID"),
        (b"\x92", "NEWOBJ_EX"),
        (b"2", "DUP"),
        (b"\xff", "0xff"),
    ] {
        let at = usize::from(bytes[0] == b'(');
        assert_eq!(says(bytes), format!("byte {at}: the instruction {name} is none that is read here"));
    }
}

#[test]
fn what_cannot_be_is_refused() {
    for (bytes, what) in [
        (&b""[..], "byte 0: it ends in the middle of a pickle"),
        (b"\x80\x06", "byte 0: it is of a protocol after 5"),
        (b".", "byte 0: it takes more from the stack than there is"),
        (b"N(.", "byte 2: it takes more from the stack than there is"),
        (b"t", "byte 0: there is no mark"),
        (b"\x86", "byte 0: it takes more from the stack than there is"),
        (b"X\xff\xff\xff\xffa", "byte 0: it ends in the middle of a pickle"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffa", "byte 0: it ends in the middle of a pickle"),
        (b"\x8c\x01\xff.", "byte 0: a text is not UTF-8"),
        (b"\x8a\x09\0\0\0\0\0\0\0\0\x01", "byte 0: a whole number has more than 64 bits"),
        (b"j\xff\xff\xff\xff", "byte 0: it recalls what it has not remembered"),
        (b"h\x00", "byte 0: it recalls what it has not remembered"),
        (b"}(Nu", "byte 3: a key has no value"),
        (b"N(NNu", "byte 4: it sets items of what is no dict"),
        (b"NNa", "byte 2: it appends to what is no list"),
        (b"N)R", "byte 2: it calls what is no name, or with what is no tuple"),
        (b"ca\nfunction\nNR", "byte 13: it calls what is no name, or with what is no tuple"),
        (b"}}b", "byte 2: a state is given to what is no object, or has one"),
        (b"NN\x93", "byte 2: a name is no text"),
    ] {
        assert_eq!(says(bytes), what, "{bytes:?}");
    }
}

#[test]
fn depth_and_loops_are_no_matter() {
    // The first pickle is a million nested lists, and the last a list that contains itself.
    let mut deep = vec![opcode::EMPTY_LIST; 1_000_000];
    deep.extend([opcode::APPEND; 999_999]);
    deep.push(opcode::STOP);
    drop(read(&deep).unwrap());
    let marks = vec![opcode::MARK; 1_000_000];
    assert!(says(&marks).ends_with("it ends in the middle of a pickle"));
    let pickle = read(b"]q\x00h\x00a.").unwrap();
    assert_eq!(pickle.items(pickle.root()), Some(&[pickle.root()][..]));
}
