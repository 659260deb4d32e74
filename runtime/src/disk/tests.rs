use super::*;

fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|k| (k.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 7) as u8).collect()
}

#[test]
fn what_was_written_is_read_whatever_its_size() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = [1, 100, 4095, 4096, 4097, PIECE - 1, PIECE + 1, 3 * PIECE + 12, (2 * DEPTH + 1) * PIECE + 5000];
    let starts: Vec<u64> = sizes.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + whole(*n) as u64))).collect();
    let disk = Disk::new(dir.path(), starts[sizes.len() - 1] + sizes[sizes.len() - 1] as u64).unwrap();
    for (k, (at, bytes)) in starts.iter().zip(sizes).enumerate() {
        disk.copy(CopyDirection::Write, *at, &mut pattern(k, bytes));
    }
    for (k, (at, bytes)) in starts.iter().zip(sizes).enumerate() {
        let mut found = vec![0xff; bytes];
        disk.copy(CopyDirection::Read, *at, &mut found);
        assert!(found == pattern(k, bytes), "{bytes} bytes");
        // Single bytes can be stored between copies.
        disk.store(at + bytes as u64 / 2, &[7]);
        disk.copy(CopyDirection::Read, *at, &mut found);
        assert_eq!(found[bytes / 2], 7);
        let mut part = vec![0; bytes.min(10)];
        disk.load(*at, &mut part);
        assert_eq!(part, found[..part.len()]);
    }
    let filled = |element: &[u8], count: u64| {
        disk.copy(CopyDirection::Write, starts[7], &mut pattern(7, sizes[7]));
        disk.fill(starts[7], element, count);
        let mut found = vec![0xff; sizes[7]];
        disk.copy(CopyDirection::Read, starts[7], &mut found);
        let (new, old) = found.split_at(element.len() * count as usize);
        assert!(new.chunks(element.len()).all(|e| e == element) && old == &pattern(7, sizes[7])[new.len()..]);
    };
    filled(&[1, 2, 3, 4], PIECE as u64 / 2);
    filled(&[0; 4], PIECE as u64 / 2);
    filled(&[0; 2], 777);
    assert_eq!(disk.failed(), None);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the file has no name");
}

#[test]
fn both_ways_are_under_way_at_the_same_time() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = 20 * PIECE + 77;
    let disk = Disk::new(dir.path(), 2 * whole(bytes) as u64).unwrap();
    let (mut first, mut second, mut found) = (pattern(1, bytes), pattern(2, bytes), vec![0; bytes]);
    disk.copy(CopyDirection::Write, 0, &mut first);
    let (mut read, mut written) = (0, 0);
    while read < bytes || written < bytes {
        if read < bytes {
            read = disk.advance(CopyDirection::Read, 0, &mut found).unwrap();
        }
        if written < bytes {
            written = disk.advance(CopyDirection::Write, whole(bytes) as u64, &mut second).unwrap();
        }
        disk.rest(Duration::from_millis(1));
    }
    assert!(found == first && !disk.rest(Duration::from_millis(1)));
    disk.copy(CopyDirection::Read, whole(bytes) as u64, &mut found);
    assert!(found == second);
    // Only one copy each way may be under way.
    disk.advance(CopyDirection::Write, 0, &mut first).unwrap();
    assert!(disk.advance(CopyDirection::Write, 4096, &mut second).is_err());
}

#[test]
fn a_disk_is_zero_at_first_and_has_no_more_than_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::new(dir.path(), 5000).unwrap();
    let mut found = vec![1; 5000];
    disk.copy(CopyDirection::Read, 0, &mut found);
    assert!(found.iter().all(|b| *b == 0));
    assert_eq!(disk.failed(), None);
    disk.copy(CopyDirection::Read, 8192, &mut found);
    assert!(disk.failed().is_some());
    disk.load(8000, &mut found);
    assert!(found.iter().all(|b| *b == 0));
    // A failed copy leaves nothing under way, and other copies go on as they would have.
    let all = |direction, at: u64, memory: &mut [u8]| {
        while disk.advance(direction, at, memory).unwrap() < memory.len() {
            disk.rest(Duration::from_millis(10));
        }
    };
    all(CopyDirection::Write, 0, &mut pattern(3, 5000));
    let mut beyond = vec![0; 3 * PIECE];
    while disk.advance(CopyDirection::Read, 8192, &mut beyond).is_ok() {}
    all(CopyDirection::Read, 0, &mut found);
    assert!(found == pattern(3, 5000));
    let none = Disk::new(&dir.path().join("none"), 1).map(drop).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::NotFound);
}

#[test]
fn a_directory_in_memory_is_told_from_one_on_a_drive() {
    let taken = |dir: &Path| memory_taken(dir).unwrap();
    assert!(taken(Path::new("/dev/shm")).is_some_and(|text| text.contains("is in memory")));
    let dir = tempfile::tempdir().unwrap();
    let direct = past_cache(&tempfile::tempfile_in(dir.path()).unwrap()).unwrap().is_some();
    match taken(dir.path()) {
        None => assert!(direct),
        Some(text) => assert!(text.contains("is in memory") || !direct && text.contains("no direct I/O"), "{text}"),
    }
    assert_eq!(memory_taken(&dir.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
}
