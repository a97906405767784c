//! Properties that must hold for all input from the kernel and from specs, whatever its bytes are: a function
//! for each fuzz target (fuzz/), as in firn-transaction.

pub use crate::cgroup::fuzz::cgroups_path;

#[cfg(test)]
#[path = "../../fuzz/kept.rs"]
mod kept;

#[cfg(test)]
mod tests {
    #[test]
    fn the_kept_inputs_pass() {
        super::kept::run("cgroups_path", super::cgroups_path);
    }
}
