//! What differs between two lists of device cgroup rules.

use std::fmt;
use std::ops::{BitAnd, BitOr, Not};

use firn_gpu::NodeType;

use super::DeviceRule;

/// What may be done with a device node. The bits are those of the kernel's device programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access(u8);

impl Access {
    pub const NONE: Self = Self(0);
    pub const MAKE: Self = Self(1);
    pub const READ: Self = Self(2);
    pub const WRITE: Self = Self(4);
    const LETTERS: [(char, Self); 3] = [('r', Self::READ), ('w', Self::WRITE), ('m', Self::MAKE)];

    /// Reads letters as in `rwm`; others are left out.
    pub fn of_letters(letters: &str) -> Self {
        let known = Self::LETTERS
            .into_iter()
            .filter(|(letter, _)| letters.contains(*letter));
        known.fold(Self::NONE, |all, (_, access)| all | access)
    }

    pub fn bits(self) -> u8 {
        self.0
    }

    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

impl BitOr for Access {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitAnd for Access {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl Not for Access {
    type Output = Self;
    fn not(self) -> Self {
        Self(!self.0 & 7)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = Self::LETTERS
            .iter()
            .filter(|(_, access)| !(*access & *self).is_none());
        letters.map(|(letter, _)| *letter).collect::<String>().fmt(f)
    }
}

/// A device to which another access is allowed than before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceChange {
    pub kind: NodeType,
    pub major: u64,
    pub minor: u64,
    pub before: Access,
    pub after: Access,
}

impl DeviceChange {
    /// What is allowed from now on and was not.
    pub fn gained(&self) -> Access {
        self.after & !self.before
    }

    /// What was allowed and is not any more.
    pub fn lost(&self) -> Access {
        self.before & !self.after
    }

    /// The change that leads back.
    pub fn reversed(&self) -> Self {
        Self {
            before: self.after,
            after: self.before,
            ..*self
        }
    }
}

impl DeviceRule {
    /// The devices that the rules name one by one and to which access changes. None when rules that name
    /// several devices at once differ: these changes have no end.
    pub fn changes(old: &[Self], new: &[Self]) -> Option<Vec<DeviceChange>> {
        let several = |rules: &'_ [Self]| -> Vec<Self> {
            rules.iter().filter(|rule| rule.is_wildcard()).cloned().collect()
        };
        if several(old) != several(new) {
            return None;
        }
        let mut changes: Vec<DeviceChange> = Vec::new();
        for id in new.iter().chain(old).filter_map(Self::one_device) {
            let change = DeviceChange {
                kind: id.kind,
                major: id.major,
                minor: id.minor,
                before: Self::access(old, id),
                after: Self::access(new, id),
            };
            if change.before != change.after && !changes.contains(&change) {
                changes.push(change);
            }
        }
        Some(changes)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Spec;

    /// Allow or deny, type, major, minor, access.
    type Rule<'a> = (bool, &'a str, i64, i64, &'a str);

    fn rules(list: &[Rule<'_>]) -> Vec<DeviceRule> {
        let rule = |&(allow, kind, major, minor, access): &Rule<'_>| {
            let mut rule = json!({"allow": allow, "type": kind, "access": access});
            rule["major"] = major.into();
            rule["minor"] = minor.into();
            rule
        };
        let list: Vec<_> = list.iter().map(rule).collect();
        let spec = json!({"linux": {"resources": {"devices": list}}});
        Spec::from(spec).device_rules().unwrap()
    }

    const NONE: Rule<'_> = (false, "a", -1, -1, "rwm");

    fn shown(old: &[DeviceRule], new: &[DeviceRule]) -> Option<Vec<String>> {
        let show = |change: DeviceChange| {
            let DeviceChange {
                kind, major, minor, ..
            } = change;
            format!("{kind:?} {major}:{minor} +{} -{}", change.gained(), change.lost())
        };
        Some(DeviceRule::changes(old, new)?.into_iter().map(show).collect())
    }

    #[test]
    fn changes_are_of_the_devices_whose_access_differs() {
        let old = rules(&[
            NONE,
            (true, "c", 195, 0, "rwm"),
            (true, "c", 195, 255, "rw"),
            (true, "b", 8, 0, "r"),
        ]);
        let new = rules(&[
            NONE,
            (true, "c", 195, 255, "rw"),
            (true, "c", 195, 1, "rwm"),
            (true, "b", 8, 0, "w"),
        ]);
        let expected = ["Char 195:1 +rwm -", "Block 8:0 +w -r", "Char 195:0 + -rwm"];
        assert_eq!(shown(&old, &new).unwrap(), expected);
        assert_eq!(shown(&old, &old).unwrap(), [""; 0]);
        let back: Vec<_> = DeviceRule::changes(&old, &new)
            .unwrap()
            .iter()
            .map(DeviceChange::reversed)
            .collect();
        assert!(
            DeviceRule::changes(&new, &old)
                .unwrap()
                .iter()
                .all(|change| back.contains(change))
        );
    }

    #[test]
    fn the_last_rule_for_a_device_wins() {
        let old = rules(&[
            NONE,
            (true, "c", 195, 0, "rw"),
            (false, "c", 195, 0, "w"),
            (true, "c", 195, 0, "m"),
        ]);
        let new = rules(&[(true, "c", 195, 0, "rwm"), NONE, (true, "c", 195, 0, "r")]);
        assert_eq!(shown(&old, &new).unwrap(), ["Char 195:0 + -m"]);
        // A rule for all of them covers the one that goes.
        let old = rules(&[NONE, (true, "c", 195, -1, "rw"), (true, "c", 195, 0, "rwm")]);
        let new = rules(&[NONE, (true, "c", 195, -1, "rw")]);
        assert_eq!(shown(&old, &new).unwrap(), ["Char 195:0 + -m"]);
    }

    #[test]
    fn rules_for_several_devices_must_be_the_same() {
        let old = rules(&[NONE, (true, "c", 195, -1, "rw")]);
        for new in [
            rules(&[NONE]),
            rules(&[NONE, (true, "c", 195, -1, "r")]),
            rules(&[]),
        ] {
            assert_eq!(shown(&old, &new), None);
        }
    }
}
