use super::*;
use crate::criu::tests::{Out, write_file};

/// A timerfd with these expirations, and what is left and its interval in nanoseconds.
fn timer(id: u64, expirations: u64, left: u64, interval: [u64; 2]) -> Out {
    let numbers = [
        (1, id),
        (2, 0),
        (4, 1),
        (5, expirations),
        (6, 0),
        (7, 0),
        (8, left),
        (9, interval[0]),
        (10, interval[1]),
    ];
    let timer = numbers
        .into_iter()
        .fold(Out::new(), |out, (field, n)| out.number(field, n));
    let timer = timer.message(3, &Out::new().number(1, 0));
    Out::new().number(1, 17).number(2, id).message(TIMER, &timer)
}

/// The field of the timer in each message of the list of open files.
fn read(dir: &Path, field: u32) -> Vec<Option<u64>> {
    let image = Image::open(dir).unwrap();
    let of = |file: &Message<'_>| file.message(TIMER)?.map_or(Ok(None), |timer| timer.long(field));
    image.read(NAME, MAGIC, of).unwrap().unwrap()
}

const PERIODIC: [[u64; 2]; 2] = [[0, 20_000_000], [1, 0]];
const ONCE: [u64; 2] = [0, 0];

#[test]
fn periodic_timers_that_have_expired_expire_at_the_restore() {
    let dir = tempfile::tempdir().unwrap();
    let regular = Out::new().number(1, 1).number(2, 1);
    let files = [
        regular.message(3, &Out::new().text(6, "/dev/null")),
        timer(2, 1, 0, PERIODIC[0]),
        timer(3, 7, 0, PERIODIC[1]),
    ];
    write_file(&dir.path().join(NAME), MAGIC, &files);
    assert_eq!(set_expired_timers(dir.path()), Ok(2));
    assert_eq!(read(dir.path(), 8), [None, Some(1), Some(1)]);
    // All else is as it was.
    for (field, expected) in [(1, [2, 3]), (4, [1, 1]), (5, [1, 7]), (7, [0, 0]), (9, [0, 1])] {
        let [first, second] = expected.map(Some);
        assert_eq!(read(dir.path(), field), [None, first, second], "field {field}");
    }
    assert_eq!(set_expired_timers(dir.path()), Ok(0), "once is enough");
}

#[test]
fn other_timers_stay_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(NAME);
    // It runs; it was stopped and keeps its interval; it has expired and has none.
    let files = [
        timer(1, 3, 5, PERIODIC[0]),
        timer(2, 0, 0, PERIODIC[0]),
        timer(3, 1, 0, ONCE),
    ];
    write_file(&path, MAGIC, &files);
    let before = std::fs::read(&path).unwrap();
    assert_eq!(set_expired_timers(dir.path()), Ok(0));
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn a_list_that_is_not_as_criu_writes_it_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert!(set_expired_timers(dir.path()).is_err(), "no list");
    let timer = Out::new().number(5, 1);
    let file = Out::new().number(1, 17).number(2, 1).message(TIMER, &timer);
    write_file(&dir.path().join(NAME), MAGIC, &[file]);
    let error = set_expired_timers(dir.path()).unwrap_err();
    assert!(matches!(error, ImageFault::Malformed { .. }), "{error}");
}
