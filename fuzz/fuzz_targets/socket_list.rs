#![no_main]

#[path = "../../criu-plugin/src/fuzz.rs"]
mod fuzz;
#[path = "../../criu-plugin/src/unix_sockets.rs"]
mod unix_sockets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::socket_list(data));
