#![no_main]

use firn_transaction::fuzz::dir;

libfuzzer_sys::fuzz_target!(|data: &[u8]| firn_image::fuzz::criu_memory(&dir(), data));
