//! numpy's legacy generator, `numpy.random.RandomState`, as far as shuffles need it.
//!
//! MT19937 is seeded as Matsumoto and Nishimura's `init_genrand` does (numpy's `mt19937_seed`). `shuffle` goes from
//! the last element to the second and changes each for one up to it; which one is drawn by `random_interval`: as many
//! bits as it has, again and again until the number is no larger (`numpy/random/src/distributions/distributions.c`).

const N: usize = 624;
const M: usize = 397;

/// A generator with the state that `RandomState(seed)` has after the same calls.
pub struct RandomState {
    key: Box<[u32; N]>,
    at: usize,
}

/// Swaps whose places are drawn before any of them is done, so that their reads of memory overlap.
const AHEAD: usize = 256;

impl RandomState {
    /// A generator in the state of `numpy.random.RandomState(seed)`.
    pub fn new(seed: u32) -> RandomState {
        let mut key = Box::new([0; N]);
        let mut value = seed;
        for (place, out) in (1u32..).zip(key.iter_mut()) {
            *out = value;
            value = (value ^ (value >> 30)).wrapping_mul(1_812_433_253).wrapping_add(place);
        }
        RandomState { key, at: N }
    }

    /// The next 32 bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.at == N {
            self.refill();
        }
        let mut y = self.key[self.at];
        self.at += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn refill(&mut self) {
        let key = &mut self.key;
        for k in 0..N {
            let y = (key[k] & 0x8000_0000) | (key[(k + 1) % N] & 0x7fff_ffff);
            key[k] = key[(k + M) % N] ^ (y >> 1) ^ if y & 1 == 1 { 0x9908_b0df } else { 0 };
        }
        self.at = 0;
    }

    /// A number from 0 to `most`.
    pub fn interval(&mut self, most: u32) -> u32 {
        if most == 0 {
            return 0;
        }
        let mask = u32::MAX >> most.leading_zeros();
        loop {
            let value = self.next_u32() & mask;
            if value <= most {
                return value;
            }
        }
    }

    /// Puts the elements, fewer than 2^32, into the order into which `RandomState.shuffle` puts an array of them.
    pub fn shuffle<T>(&mut self, elements: &mut [T]) {
        let mut places = [0u32; AHEAD];
        let mut left = elements.len();
        while left > 1 {
            let count = AHEAD.min(left - 1);
            for (k, place) in places[..count].iter_mut().enumerate() {
                *place = self.interval((left - 1 - k) as u32);
            }
            for (k, place) in places[..count].iter().enumerate() {
                elements.swap(left - 1 - k, *place as usize);
            }
            left -= count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `RandomState(s)` and then `r.randint(0, 2**32, 3, dtype=numpy.uint32)`, which for this range is the raw bits.
    #[test]
    fn bits_are_those_of_mt19937() {
        let mut r = RandomState::new(5489);
        assert_eq!([r.next_u32(), r.next_u32(), r.next_u32()], [3_499_211_612, 581_869_302, 3_890_346_734]);
        // The C++ standard gives the ten thousandth number for the default seed.
        (3..9999).for_each(|_| {
            r.next_u32();
        });
        assert_eq!(r.next_u32(), 4_123_659_995);
    }

    /// `r = numpy.random.RandomState(1234); a = numpy.arange(10); r.shuffle(a)`.
    #[test]
    fn shuffles_are_those_of_numpy() {
        let mut a: Vec<u32> = (0..10).collect();
        RandomState::new(1234).shuffle(&mut a);
        assert_eq!(a, [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]);
    }
}
