//! Opens a data set and reads its first sample: `first_sample PREFIX SAMPLES SEQUENCE_LENGTH CACHE`, where `-` keeps
//! the order in memory. Prints the seconds that it took; `python -m bench.data` runs it beside megatron-core.

use data::blend::Blend;
use data::dataset::{self, Cache, Request, Source};
use data::split::Split;
use std::error::Error;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [prefix, samples, length, cache] = &words[..] else { return Err("PREFIX SAMPLES SEQUENCE_LENGTH CACHE".into()) };
    let cache = if cache == "-" { Cache::Nowhere } else { Cache::Folder(cache.into()) };
    let begin = Instant::now();
    let blend = Blend { prefixes: vec![prefix.into()], weights: None };
    let source = Source::Shared { blend, split: Split::parse("1")? };
    let request = Request { cache, ..Request::new(source, [Some(samples.parse()?), None, None], length.parse()?) };
    let [Some(set), ..] = dataset::open(&request)?.parts else { return Err("it has no samples".into()) };
    let mut tokens = vec![0u32; set.width()];
    set.sample(0, &mut tokens, &mut vec![])?;
    println!("{} {} {:?}", begin.elapsed().as_secs_f64(), set.len(), &tokens[..tokens.len().min(8)]);
    Ok(())
}
