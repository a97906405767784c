//! What stands between a program and libcuda: the functions of the driver, and the gate that a program's
//! threads pass at each of them.
//!
//! It is for a library inside of programs, so it has no standard library, allocates nothing and does not
//! panic.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod abi;
pub mod facts;
pub mod gate;
pub mod sorted;
pub mod table;
pub mod token;
