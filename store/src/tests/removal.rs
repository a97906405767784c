//! What is removed from a store, by which proof, and what stays.

use std::time::Duration;

use super::*;
use crate::layout::try_lock;

const HOUR: u64 = 3600;
/// When the indexes of these tests were made.
const MADE: u64 = 1_700_000_000;

/// Those of gc so many seconds after the indexes were made, with a grace of an hour.
pub fn rules(later: u64) -> Rules {
    Rules {
        now: Duration::from_secs(MADE + later),
        grace: Duration::from_secs(HOUR),
        machine: Some("this".to_owned()),
        other_machines: false,
        unreferenced_since: None,
    }
}

impl Scratch {
    /// A checkpoint of this machine.
    fn own(&self, content: &[u8]) -> Digest {
        self.own_with(content, |_| {})
    }

    fn own_with(&self, content: &[u8], change: impl Fn(&mut Index)) -> Digest {
        let writer = self.store.writer(None).unwrap();
        let put = piece(content.len() as u64, vec![writer.put(content).unwrap()]);
        let mut index = Index {
            machine: Some("this".to_owned()),
            made: MADE,
            ..index(vec![put])
        };
        change(&mut index);
        writer.finish(&index).unwrap()
    }

    /// What gc does where nothing is known to need any of these.
    fn collect(&self, known: &[Digest], rules: &Rules) -> Decisions {
        let needs: Needs = known.iter().map(|id| (*id, None)).collect();
        let dry = Decisions::make(&self.store, &needs, rules).unwrap();
        let done = self.store.removal().unwrap().collect(&needs, rules).unwrap();
        let same = (dry.kept == done.kept, dry.extents == done.extents);
        assert_eq!((same, dry.bytes()), ((true, true), done.bytes()));
        for id in dry.gone.keys() {
            assert!(!self.store.images().unwrap().contains(id));
        }
        done
    }

    fn reason(&self, id: &Digest, rules: &Rules) -> Option<Kept> {
        let needs = [(*id, None)].into();
        let decisions = Decisions::make(&self.store, &needs, rules).unwrap();
        decisions.kept.get(id).cloned()
    }
}

#[test]
fn without_a_proof_an_index_is_kept_for_ever() {
    let scratch = Scratch::new();
    let id = scratch.own(b"one");
    for later in [2 * HOUR, 1000 * HOUR, 100_000 * HOUR] {
        let done = scratch.collect(&[id], &rules(later));
        assert!(
            matches!(done.kept[&id], Kept::Unreferenced { .. }),
            "{:?}",
            done.kept
        );
        assert!(done.gone.is_empty() && done.extents.is_empty());
    }
    scratch.store.read(&Digest::of(b"one"), &mut [0; 3]).unwrap();
}

#[test]
fn what_was_stated_to_be_gone_goes_unless_something_needs_it() {
    let scratch = Scratch::new();
    let (id, other) = (scratch.own(b"one"), scratch.own(b"two"));
    let store = &scratch.store;
    store.release(&id).unwrap();
    assert!(store.noted(&id).unwrap().is_released);
    // Something names it.
    let needs = [(id, Some("an image".to_owned())), (other, None)].into();
    let decisions = Decisions::make(store, &needs, &rules(HOUR)).unwrap();
    assert_eq!(decisions.kept[&id], Kept::Needed("an image".to_owned()));
    // It has come after gc has looked.
    let decisions = Decisions::make(store, &Needs::new(), &rules(HOUR)).unwrap();
    assert_eq!(decisions.kept[&id], Kept::New);
    // It is young, also where the clock was in the future.
    for (later, seconds) in [(HOUR - 1, HOUR - 1), (0, 0)] {
        assert_eq!(scratch.reason(&id, &rules(later)), Some(Kept::Young { seconds }));
    }
    let early = Rules {
        now: Duration::from_secs(7),
        ..rules(0)
    };
    assert_eq!(scratch.reason(&id, &early), Some(Kept::Young { seconds: 0 }));

    let done = scratch.collect(&[id, other], &rules(HOUR));
    assert_eq!(done.gone.keys().collect::<Vec<_>>(), [&id]);
    assert_eq!(done.extents, [(Digest::of(b"one"), 3)].into());
    assert_eq!(done.bytes(), 3);
    assert_eq!(store.images().unwrap(), [other].into());
    store.read(&Digest::of(b"two"), &mut [0; 3]).unwrap();
    assert_eq!(
        code(store.read(&Digest::of(b"one"), &mut [0; 3])),
        "FIRN-STORE-MISSING"
    );
    // Nothing is left that is noted of it.
    assert_eq!(store.noted(&id).unwrap(), Noted::default());
}

#[test]
fn an_index_of_another_machine_is_kept_by_its_id_and_not_by_its_name() {
    let scratch = Scratch::new();
    let other = scratch.own_with(b"one", |index| index.machine = Some("other".to_owned()));
    let old = scratch.own_with(b"two", |index| index.machine = None);
    for id in [other, old] {
        scratch.store.release(&id).unwrap();
        let kept = Some(Kept::OfNode("node".to_owned()));
        assert_eq!(scratch.reason(&id, &rules(HOUR)), kept);
        // A machine that does not know itself.
        let nobody = Rules {
            machine: None,
            ..rules(HOUR)
        };
        assert_eq!(scratch.reason(&id, &nobody), kept);
        let all = Rules {
            other_machines: true,
            ..rules(HOUR)
        };
        assert_eq!(scratch.reason(&id, &all), None);
    }
    let this = Rules {
        machine: Some("other".to_owned()),
        ..rules(HOUR)
    };
    assert_eq!(scratch.reason(&other, &this), None);
    // Of what another node has noted nothing is changed.
    scratch
        .store
        .set_unreferenced(&other, Some(Duration::from_secs(MADE)))
        .unwrap();
    scratch.collect(&[other, old], &rules(HOUR));
    assert!(scratch.store.noted(&other).unwrap().unreferenced.is_some());
}

#[test]
fn the_operator_may_name_a_time_for_which_nothing_names_an_index() {
    let scratch = Scratch::new();
    let id = scratch.own(b"one");
    let day = 24 * HOUR;
    let week = |later: u64| Rules {
        unreferenced_since: Some(Duration::from_secs(7 * day)),
        ..rules(later)
    };
    let seen = |later: u64, needed: bool| {
        let needs = [(id, needed.then(|| "an image".to_owned()))].into();
        scratch
            .store
            .removal()
            .unwrap()
            .collect(&needs, &week(later))
            .unwrap()
    };
    // However old it is: the time begins when gc looks for the first time.
    let done = seen(100 * day, false);
    assert_eq!(done.kept[&id], Kept::Unreferenced { seconds: 0 });
    let done = seen(106 * day, false);
    assert_eq!(done.kept[&id], Kept::Unreferenced { seconds: 6 * day });
    // Something names it: the time begins again.
    seen(107 * day, true);
    assert_eq!(scratch.store.noted(&id).unwrap().unreferenced, None);
    assert_eq!(
        seen(108 * day, false).kept[&id],
        Kept::Unreferenced { seconds: 0 }
    );
    let done = seen(115 * day - 1, false);
    assert_eq!(done.kept[&id], Kept::Unreferenced { seconds: 7 * day - 1 });
    // A gc without the option changes nothing of that, and removes nothing.
    scratch.collect(&[id], &rules(300 * day));
    assert!(seen(115 * day, false).gone.contains_key(&id));
}

#[test]
fn a_note_that_a_wrong_clock_has_made_counts_from_when_the_index_was_made() {
    let scratch = Scratch::new();
    let id = scratch.own(b"one");
    scratch
        .store
        .set_unreferenced(&id, Some(Duration::from_secs(1)))
        .unwrap();
    let limit = |seconds| Rules {
        unreferenced_since: Some(Duration::from_secs(seconds)),
        ..rules(2 * HOUR)
    };
    let kept = Some(Kept::Unreferenced { seconds: 2 * HOUR });
    assert_eq!(scratch.reason(&id, &limit(2 * HOUR + 1)), kept);
    assert_eq!(scratch.reason(&id, &limit(2 * HOUR)), None);
    // One of the future, and one without a time, have just been made.
    let mark = scratch.root().join(format!("unreferenced/{id}"));
    for text in ["99999999999", "", "soon"] {
        fs::write(&mark, text).unwrap();
        let kept = Some(Kept::Unreferenced { seconds: 0 });
        assert_eq!(scratch.reason(&id, &limit(1)), kept, "{text:?}");
    }
}

#[test]
fn pins_last_until_they_are_taken_away() {
    let scratch = Scratch::new();
    let id = scratch.own(b"one");
    let store = &scratch.store;
    assert!(store.pinned().unwrap().is_empty());
    let anything = Rules {
        unreferenced_since: Some(Duration::ZERO),
        other_machines: true,
        ..rules(1000 * HOUR)
    };
    store.release(&id).unwrap();
    assert_eq!(scratch.reason(&id, &anything), None);

    store.pin(&id, Pin::Checkpoint).unwrap();
    store.pin(&id, Pin::Checkpoint).unwrap();
    assert_eq!(
        scratch.reason(&id, &anything),
        Some(Kept::Pinned(Pin::Checkpoint))
    );
    let noted = Noted {
        pin: Some(Pin::Checkpoint),
        ..Noted::default()
    };
    assert_eq!(
        store.noted(&id).unwrap(),
        noted,
        "what was stated before counts no more"
    );
    // The checkpoint is removed.
    store.release(&id).unwrap();
    assert_eq!(scratch.reason(&id, &anything), None);
    assert_eq!(
        store.noted(&id).unwrap(),
        Noted {
            is_released: true,
            ..Noted::default()
        }
    );

    // That of an operator outlasts the checkpoint's, and its removal.
    store.pin(&id, Pin::Operator).unwrap();
    store.pin(&id, Pin::Checkpoint).unwrap();
    store.release(&id).unwrap();
    let again = Store::open(&scratch.root(), &Packing::default()).unwrap();
    assert_eq!(again.pinned().unwrap(), [id].into());
    assert_eq!(scratch.reason(&id, &anything), Some(Kept::Pinned(Pin::Operator)));
    assert!(store.unpin(&id).unwrap() && !store.unpin(&id).unwrap());
    assert!(store.pinned().unwrap().is_empty());
    assert_eq!(
        scratch.reason(&id, &rules(HOUR)),
        None,
        "whoever unpins it states that"
    );

    let none = Digest::of(b"none");
    assert_eq!(code(store.pin(&none, Pin::Operator)), "FIRN-STORE-MISSING");
    assert!(!store.unpin(&none).unwrap());
    assert_eq!(store.noted(&none).unwrap(), Noted::default());
    // A pin cannot be made while gc is at work.
    assert!(Kept::Pinned(Pin::Operator).to_string().contains("pinned"));
}

#[test]
fn a_mark_that_cannot_be_read_ends_gc() {
    let scratch = Scratch::new();
    let id = scratch.own(b"one");
    let store = &scratch.store;
    store.release(&id).unwrap();
    for dir in ["pinned", "unreferenced"] {
        let mark = scratch.root().join(dir).join(id.to_string());
        fs::create_dir_all(&mark).unwrap();
        let needs = [(id, None)].into();
        assert_eq!(
            code(Decisions::make(store, &needs, &rules(HOUR))),
            "FIRN-STORE-IO"
        );
        let removed = store.removal().unwrap().collect(&needs, &rules(HOUR));
        assert_eq!(code(removed), "FIRN-STORE-IO");
        fs::remove_dir(&mark).unwrap();
    }
    store.read(&Digest::of(b"one"), &mut [0; 3]).unwrap();
}

#[test]
fn extents_stay_that_another_index_names() {
    for packing in [
        Packing::default(),
        Packing {
            compressed: true,
            key: None,
        },
    ] {
        let scratch = Scratch::packed(&packing);
        let store = &scratch.store;
        let (gone, _) = scratch.holds(&[b"one", b"common", b"common"]);
        let (left, index) = scratch.holds(&[b"two", b"common"]);
        let writer = store.writer(None).unwrap();
        writer.put(b"of nobody").unwrap();
        let mut writer = writer;
        writer.publish().unwrap();
        writer.abort();
        store.release(&gone).unwrap();
        let all = Rules {
            other_machines: true,
            ..rules(HOUR)
        };
        let done = scratch.collect(&[gone, left], &all);
        assert_eq!((done.gone.len(), done.kept.len(), done.extents.len()), (1, 1, 2));
        assert_eq!(store.missing(&index).unwrap(), []);
        assert_eq!(store.extents().unwrap().len(), 2);
    }
}

#[test]
fn an_index_that_cannot_be_read_ends_gc() {
    let scratch = Scratch::new();
    let (gone, damaged) = (scratch.own(b"one"), scratch.own(b"two"));
    let store = &scratch.store;
    store.release(&gone).unwrap();
    let file = scratch.root().join(format!("images/{damaged}"));
    fs::write(&file, "{}").unwrap();
    let needs = [(gone, None), (damaged, None)].into();
    let removal = store.removal().unwrap();
    assert_eq!(code(removal.collect(&needs, &rules(HOUR))), "FIRN-STORE-DAMAGED");
    assert_eq!(store.images().unwrap(), [gone, damaged].into());
    store.read(&Digest::of(b"one"), &mut [0; 3]).unwrap();
    // Only one that is damaged is removed as such.
    assert!(!removal.damaged_index(&gone).unwrap());
    assert!(removal.damaged_index(&damaged).unwrap());
    assert!(!removal.damaged_index(&damaged).unwrap());
    assert_eq!(store.images().unwrap(), [gone].into());
}

#[test]
fn only_a_damaged_extent_is_removed_as_such() {
    let scratch = Scratch::new();
    let (_, index) = scratch.holds(&[b"one", b"two", b"three"]);
    let [one, two, three] = [0, 1, 2].map(|at: usize| index.pieces[at].extents[0].unwrap());
    fs::write(scratch.extent(&one), "onf").unwrap();
    fs::remove_file(scratch.extent(&three)).unwrap();
    fs::create_dir(scratch.extent(&three)).unwrap();
    let removal = scratch.store.removal().unwrap();
    assert!(!removal.damaged_extent(&two).unwrap());
    for damaged in [&one, &three] {
        assert!(removal.damaged_extent(damaged).unwrap());
        assert!(!removal.damaged_extent(damaged).unwrap());
    }
    assert!(!removal.damaged_extent(&Digest::of(b"never")).unwrap());
    assert_eq!(scratch.store.missing(&index).unwrap().len(), 2);
    scratch.store.read(&two, &mut [0; 3]).unwrap();
}

#[test]
fn nobody_writes_while_something_is_removed() {
    let scratch = Scratch::new();
    let shared = || try_lock(scratch.store.dir(), &scratch.root(), FlockArg::LockSharedNonblock).unwrap();
    let removal = scratch.store.removal().unwrap();
    assert!(shared().is_none(), "a writer may begin while extents are removed");
    drop(removal);
    assert!(shared().is_some());
}

#[test]
fn reasons_are_shown() {
    for (kept, shown) in [
        (Kept::Pinned(Pin::Operator), "it is pinned"),
        (
            Kept::Pinned(Pin::Checkpoint),
            "`firn images prune` or `firn store unpin`",
        ),
        (Kept::Needed("/a is there".to_owned()), "/a is there"),
        (Kept::New, "it is new"),
        (Kept::Young { seconds: 7 }, "it is 7 s old"),
        (Kept::OfNode("n".to_owned()), "it is of node n"),
        (Kept::Unreferenced { seconds: 9 }, "for 9 s"),
    ] {
        assert!(kept.to_string().contains(shown), "{kept}");
    }
}
