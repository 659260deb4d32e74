//! The instructions of pickles, as Python's `pickletools` names them.

/// Those that are read, as constants; and the names of all.
macro_rules! opcodes {
    (read { $($name:ident = $byte:literal,)* } refused { $($other:ident = $code:literal,)* }) => {
        $(pub const $name: u8 = $byte;)*

        /// The name of an instruction, or its byte if there is none.
        pub fn name(byte: u8) -> String {
            match byte {
                $($byte => stringify!($name).into(),)*
                $($code => stringify!($other).into(),)*
                _ => format!("{byte:#04x}"),
            }
        }
    };
}

opcodes! {
    read {
        MARK = b'(',
        STOP = b'.',
        BININT = b'J',
        BININT1 = b'K',
        BININT2 = b'M',
        NONE = b'N',
        BINPERSID = b'Q',
        REDUCE = b'R',
        BINUNICODE = b'X',
        APPEND = b'a',
        BUILD = b'b',
        GLOBAL = b'c',
        APPENDS = b'e',
        BINGET = b'h',
        LONG_BINGET = b'j',
        BINPUT = b'q',
        LONG_BINPUT = b'r',
        SETITEM = b's',
        TUPLE = b't',
        EMPTY_TUPLE = b')',
        EMPTY_LIST = b']',
        SETITEMS = b'u',
        EMPTY_DICT = b'}',
        BINFLOAT = b'G',
        PROTO = 0x80,
        NEWOBJ = 0x81,
        TUPLE1 = 0x85,
        TUPLE2 = 0x86,
        TUPLE3 = 0x87,
        NEWTRUE = 0x88,
        NEWFALSE = 0x89,
        LONG1 = 0x8a,
        SHORT_BINUNICODE = 0x8c,
        BINUNICODE8 = 0x8d,
        STACK_GLOBAL = 0x93,
        MEMOIZE = 0x94,
        FRAME = 0x95,
    }
    refused {
        POP = b'0',
        POP_MARK = b'1',
        DUP = b'2',
        FLOAT = b'F',
        INT = b'I',
        LONG = b'L',
        PERSID = b'P',
        STRING = b'S',
        BINSTRING = b'T',
        SHORT_BINSTRING = b'U',
        UNICODE = b'V',
        DICT = b'd',
        GET = b'g',
        INST = b'i',
        LIST = b'l',
        OBJ = b'o',
        PUT = b'p',
        BINBYTES = b'B',
        SHORT_BINBYTES = b'C',
        EXT1 = 0x82,
        EXT2 = 0x83,
        EXT4 = 0x84,
        LONG4 = 0x8b,
        BINBYTES8 = 0x8e,
        EMPTY_SET = 0x8f,
        ADDITEMS = 0x90,
        FROZENSET = 0x91,
        NEWOBJ_EX = 0x92,
        BYTEARRAY8 = 0x96,
        NEXT_BUFFER = 0x97,
        READONLY_BUFFER = 0x98,
    }
}
