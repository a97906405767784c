//! Ordered collections of few items, in little code.
//!
//! `collect` into a tree of the standard library sorts first, and each sort of a type is 4 KB of code: 2 % of
//! the shim altogether.

use std::collections::{BTreeMap, BTreeSet};

/// The items as a set.
pub fn set_of<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    let mut set = BTreeSet::new();
    set.extend(items);
    set
}

/// The pairs as a map; of pairs with equal keys the last one counts.
pub fn map_of<K: Ord, V>(pairs: impl IntoIterator<Item = (K, V)>) -> BTreeMap<K, V> {
    let mut map = BTreeMap::new();
    map.extend(pairs);
    map
}

/// Sorts by `key` and keeps the order of items with equal keys. For lists of some hundred items at most: the
/// time grows with the square of their number.
pub fn sort_few_by_key<T, K: Ord>(items: &mut [T], mut key: impl FnMut(&T) -> K) {
    for end in 1..items.len() {
        let mut at = end;
        while at > 0 && key(&items[at]) < key(&items[at - 1]) {
            items.swap(at, at - 1);
            at -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_items_are_sorted_as_by_the_standard_library() {
        for seed in 0..200_u32 {
            let mut items: Vec<(u32, u32)> = (0..seed % 20)
                .map(|at| (seed.wrapping_mul(2_654_435_761).rotate_left(at) % 7, at))
                .collect();
            let mut expected = items.clone();
            expected.sort_by_key(|item| item.0);
            sort_few_by_key(&mut items, |item| item.0);
            assert_eq!(items, expected);
        }
    }

    #[test]
    fn the_last_of_equal_keys_counts() {
        assert_eq!(
            map_of([(2, 'a'), (1, 'b'), (2, 'c')]),
            BTreeMap::from([(1, 'b'), (2, 'c')])
        );
        assert_eq!(set_of([3, 1, 3]), BTreeSet::from([1, 3]));
    }
}
