//! Items in the order of their keys, in memory of a fixed size.

/// An item that has a key.
pub trait Keyed: Copy {
    fn key(&self) -> u64;
}

/// At most `N` items. Of zero bytes it has none.
#[derive(Debug)]
#[repr(C)]
pub struct Sorted<T, const N: usize> {
    count: usize,
    items: [T; N],
}

/// There is no room for another item, or there is one with this key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

impl<T: Keyed, const N: usize> Sorted<T, N> {
    /// All items.
    pub fn all(&self) -> &[T] {
        self.items.get(..self.count).unwrap_or(&self.items)
    }

    /// The same, to be changed. Their keys stay.
    pub fn all_mut(&mut self) -> &mut [T] {
        let count = self.count.min(N);
        match self.items.split_at_mut_checked(count) {
            Some((all, _)) => all,
            None => &mut [],
        }
    }

    /// The index of the first item whose key is not below this one.
    fn from(&self, key: u64) -> usize {
        self.all().partition_point(|item| item.key() < key)
    }

    /// The item with this key.
    pub fn get(&self, key: u64) -> Option<&T> {
        self.all().get(self.from(key)).filter(|item| item.key() == key)
    }

    /// The same, to be changed. Its key stays.
    pub fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        let index = self.from(key);
        let item = self.all_mut().get_mut(index)?;
        (item.key() == key).then_some(item)
    }

    /// The last item whose key is not above this one.
    pub fn last_up_to(&self, key: u64) -> Option<&T> {
        let after = self.all().partition_point(|item| item.key() <= key);
        self.all().get(after.checked_sub(1)?)
    }

    /// The items with keys from `begin` on, below `end`.
    pub fn between(&self, begin: u64, end: u64) -> &[T] {
        self.all()
            .get(self.from(begin)..self.from(end))
            .unwrap_or_default()
    }

    /// The same, to be changed. Their keys stay.
    pub fn between_mut(&mut self, begin: u64, end: u64) -> &mut [T] {
        let range = self.from(begin)..self.from(end);
        self.all_mut().get_mut(range).unwrap_or_default()
    }

    /// Adds an item.
    ///
    /// # Errors
    /// There are `N` items, or one with its key.
    pub fn insert(&mut self, item: T) -> Result<(), Refused> {
        let index = self.from(item.key());
        let is_known = self.get(item.key()).is_some();
        let count = self.count.checked_add(1).filter(|_| !is_known).ok_or(Refused)?;
        let moved = self.items.get_mut(index..count).ok_or(Refused)?;
        if let Some(kept) = moved.len().checked_sub(1) {
            moved.copy_within(..kept, 1);
        }
        *moved.first_mut().ok_or(Refused)? = item;
        self.count = count;
        Ok(())
    }

    /// Removes the item with this key.
    pub fn remove(&mut self, key: u64) -> Option<T> {
        let item = *self.get(key)?;
        let index = self.from(key);
        let moved = self.all_mut().get_mut(index..)?;
        if moved.len() > 1 {
            moved.copy_within(1.., 0);
        }
        self.count = self.count.checked_sub(1)?;
        Some(item)
    }
}

impl<T: Keyed + Default, const N: usize> Default for Sorted<T, N> {
    fn default() -> Self {
        Self {
            count: 0,
            items: [T::default(); N],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::vec::Vec;

    use super::*;

    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    struct Item(u64, u32);

    impl Keyed for Item {
        fn key(&self) -> u64 {
            self.0
        }
    }

    #[test]
    fn it_does_as_a_map_does() {
        let (mut sorted, mut map) = (Sorted::<Item, 40>::default(), BTreeMap::new());
        // Any sequence does: this one comes to every number again.
        let mut random = 1_u64;
        for turn in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (key, item) = (random >> 58, Item(random >> 58, turn));
            if random & 1 << 40 == 0 {
                let is_free = map.len() < 40 && !map.contains_key(&key);
                assert_eq!(sorted.insert(item).is_ok(), is_free);
                if is_free {
                    map.insert(key, item);
                }
            } else {
                assert_eq!(sorted.remove(key), map.remove(&key));
            }
            if let Some(item) = sorted.get_mut(key) {
                item.1 = turn;
            }
            if let Some(item) = map.get_mut(&key) {
                item.1 = turn;
            }
            assert_eq!(sorted.get(key), map.get(&key));
            assert_eq!(
                sorted.last_up_to(key),
                map.range(..=key).next_back().map(|(_, item)| item)
            );
            let (begin, end) = (key / 2, key);
            let expected: Vec<Item> = map.range(begin..end).map(|(_, item)| *item).collect();
            assert_eq!(sorted.between(begin, end), expected);
            assert_eq!(sorted.between_mut(begin, end), expected);
            assert!(sorted.between(end, begin).is_empty());
            assert!(sorted.all().iter().eq(map.values()));
        }
        assert!(map.len() > 10);
    }
}
