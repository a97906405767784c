//! What is stated in the store of checkpoints that were removed, for `firn store gc`.

use std::collections::HashSet;

use firn_host::ProblemReport;
use firn_store::{Digest, Index, Store, StoreError, machine};

use super::find::Checkpoint;
use crate::output::note;

/// Notes in the store that these checkpoints are gone. Not of memory that another one needs, or that is
/// another node's: nobody has stated anything of the checkpoints there.
pub fn release(store: Option<&Store>, found: &[Checkpoint], gone: &[&Checkpoint]) {
    let Some(store) = store else {
        return;
    };
    let is_gone = |one: &&Checkpoint| gone.iter().any(|gone| std::ptr::eq(*gone, *one));
    let left = found.iter().filter(|one| !is_gone(one));
    let left: HashSet<Digest> = left.filter_map(Checkpoint::index).collect();
    let indexes = gone.iter().filter_map(|one| one.index());
    for index in indexes.filter(|index| !left.contains(index)) {
        let is_of_other = |found: &Index| found.machine.is_some() && found.machine != machine();
        let released = match store.index(&index) {
            Err(StoreError::Missing { .. }) => Ok(()),
            Ok(found) if is_of_other(&found) => Ok(()),
            Ok(_) => store.release(&index),
            Err(error) => Err(error),
        };
        if let Err(error) = released {
            let error = ProblemReport::from(error);
            note!("firn: memory {index} stays in the store: {error}");
        }
    }
}
