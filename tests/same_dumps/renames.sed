# What dumps call otherwise since the build that is compared with: `s/old/new/g`.
